"""The SQLite schema of the journal, and how the file is opened.

SQLite in WAL mode: it is in the standard library, a commit is atomic under kill -9 at any instruction,
`audit` can read it while the run is alive and afterwards, and a user can open it with the `sqlite3` command.
With `synchronous=NORMAL` a commit is a write without a flush: it survives the death of the process. `sync()`
adds the flush that survives a power cut, once per checkpoint instead of once per row.

    rows    one entry per row in flight, and per trained row (`trained` is its step) until that step is settled
    packs   the columns of a row that were written together; id = row id · 2²⁰ + number of earlier packs, so a
            row's packs are adjacent and need no second index
    spills  which packs refer to which spill segment
    events  the ledger: append-only, one entry per fact with the keys it is true of (a JSON list: rows with the
            same fact in one commit share an entry); sign −1 revokes an earlier fact (see rewind.py)
    facts   a view of the ledger with one line per key
    meta    format, epoch, settled step
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from functools import lru_cache
from pathlib import Path
from typing import Any

from understudy.errors import DataPlaneError
from understudy.observability.faults import point

FORMAT = 1
FILE_NAME = "journal.sqlite"
PACK_SHIFT = 20
_MOST_ROWS_LOG2 = 8
_FEW_ROWS = 16
"""Up to this many rows go into one statement; more into statements of powers of two, so few are prepared."""
_STATEMENTS = 256
"""Prepared statements kept."""

_TABLES = (
    "CREATE TABLE meta(name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID",
    """CREATE TABLE rows(
        id INTEGER PRIMARY KEY, partition TEXT NOT NULL, key TEXT NOT NULL, grp TEXT, policy TEXT,
        status TEXT NOT NULL, step INTEGER NOT NULL, arrival INTEGER NOT NULL, attempts INTEGER NOT NULL,
        tags TEXT NOT NULL, trained INTEGER)""",
    "CREATE TABLE packs(id INTEGER PRIMARY KEY, body BLOB NOT NULL)",
    """CREATE TABLE spills(pack INTEGER NOT NULL, segment INTEGER NOT NULL,
        PRIMARY KEY(pack, segment)) WITHOUT ROWID""",
    """CREATE TABLE events(
        seq INTEGER PRIMARY KEY, kind TEXT NOT NULL, sign INTEGER NOT NULL, partition TEXT NOT NULL,
        step INTEGER NOT NULL, detail TEXT, keys TEXT NOT NULL)""",
    """CREATE VIEW facts AS
        SELECT events.seq, kind, sign, partition, step, detail, each.key AS place, each.value AS key
        FROM events, json_each(events.keys) AS each""",
)
_ROW = "id, partition, key, status, step, arrival, attempts, tags"
# Columns left out are NULL. Binding None as a parameter costs more than all other parameters of the line:
# Python's sqlite3 looks for an adapter of None first.
INSERT_ROWS = f"INSERT OR REPLACE INTO rows({_ROW}) VALUES "
INSERT_GROUPED_ROWS = f"INSERT OR REPLACE INTO rows({_ROW}, grp, policy) VALUES "
INSERT_PACKS = "INSERT INTO packs VALUES "
INSERT_SPILLS = "INSERT OR IGNORE INTO spills VALUES "
INSERT_EVENTS = "INSERT INTO events(kind, sign, partition, step, keys) VALUES "
INSERT_EVENTS_WITH_DETAIL = "INSERT INTO events(kind, sign, partition, step, keys, detail) VALUES "


def cannot_be_opened(file: Path, error: sqlite3.DatabaseError) -> DataPlaneError:
    """Also a reader needs room: SQLite makes a file of shared memory beside the journal."""
    advice = "" if "not a database" in str(error) else "; free space or mend the disk, then resume"
    return DataPlaneError(f"{file} cannot be opened as a journal: {error}{advice}")


def connect(file: Path) -> sqlite3.Connection:
    """Open for writing; the caller begins and ends transactions explicitly."""
    try:
        if not file.exists():
            _create(file)
    except sqlite3.DatabaseError as error:
        raise DataPlaneError(
            f"the journal {file} cannot be written: {error}; free space or mend the disk, then resume"
        ) from None
    connection = sqlite3.connect(
        file, isolation_level=None, check_same_thread=False, timeout=30.0, cached_statements=_STATEMENTS
    )
    try:
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute("PRAGMA wal_autocheckpoint=0")
        connection.execute("PRAGMA cache_size=-65536")
        found = read_meta(connection, "format", -1)
    except sqlite3.DatabaseError as error:
        connection.close()
        raise cannot_be_opened(file, error) from None
    if found != FORMAT:
        connection.close()
        raise DataPlaneError(f"{file} has journal format {found}; this version reads format {FORMAT}")
    return connection


def _create(file: Path) -> None:
    """Create under a temporary name and rename: SQLite sets up a database in several steps that no reader may
    see."""
    fresh = file.with_name(file.name + ".new")
    for leftover in file.parent.glob(fresh.name + "*"):
        leftover.unlink()
    with closing(sqlite3.connect(fresh, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        for statement in _TABLES:
            connection.execute(statement)
        connection.execute("INSERT INTO meta VALUES ('format', ?)", (FORMAT,))
    point("journal.before_create")
    fresh.replace(file)


def read_meta(connection: sqlite3.Connection, name: str, default: int) -> int:
    found = connection.execute("SELECT value FROM meta WHERE name=?", (name,)).fetchone()
    return default if found is None else int(found[0])


def write_meta(connection: sqlite3.Connection, name: str, value: int) -> None:
    connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))


def insert_many(cursor: sqlite3.Cursor, head: str, width: int, values: list[Any]) -> None:
    """Insert rows of `width` values, given as one flat list, in statements of many rows each.

    Every statement releases the GIL once. `executemany` releases it for every row, and in a busy process each
    reacquisition can cost a whole switch interval (5 ms).
    """
    left = len(values) // width
    if left <= _FEW_ROWS:
        cursor.execute(_insert(head, width, left), values)
        return
    done = 0
    while left:
        size = left if left <= _FEW_ROWS else 1 << min(left.bit_length() - 1, _MOST_ROWS_LOG2)
        cursor.execute(_insert(head, width, size), values[done * width : (done + size) * width])
        done += size
        left -= size


@lru_cache(maxsize=_STATEMENTS)
def _insert(head: str, width: int, rows: int) -> str:
    """Uses bare placeholders only: Python 3.12.1 deprecates a sequence of values for numbered ones.

    >>> _insert("INSERT INTO t VALUES ", 3, 2)
    'INSERT INTO t VALUES (?,?,?),(?,?,?)'
    """
    return head + ",".join(("(" + ",".join("?" * width) + ")",) * rows)


def runs(ids: Iterable[int]) -> Iterator[tuple[int, int]]:
    """(first, last) of each run of consecutive numbers: rows made together are acked together, in one
    statement."""
    first = last = None
    for number in sorted(ids):
        if last is not None and number <= last + 1:
            last = number
            continue
        if first is not None and last is not None:
            yield first, last
        first = last = number
    if first is not None and last is not None:
        yield first, last


def delete_packs(connection: sqlite3.Connection | sqlite3.Cursor, row_ids: Iterable[int]) -> None:
    for first, last in runs(row_ids):
        bounds = (first << PACK_SHIFT, (last + 1) << PACK_SHIFT)
        connection.execute("DELETE FROM packs WHERE id >= ? AND id < ?", bounds)
        connection.execute("DELETE FROM spills WHERE pack >= ? AND pack < ?", bounds)


def delete_rows(connection: sqlite3.Connection | sqlite3.Cursor, row_ids: Sequence[int]) -> None:
    delete_packs(connection, row_ids)
    for bounds in runs(row_ids):
        connection.execute("DELETE FROM rows WHERE id BETWEEN ? AND ?", bounds)
