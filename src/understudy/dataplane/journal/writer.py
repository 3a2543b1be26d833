"""The contents of one journal transaction (`Changes`) and its commit (`Writer`). One thread at a time."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from understudy.dataplane.frame import SpillRef
from understudy.dataplane.journal import schema
from understudy.dataplane.journal.spill import SpillFiles
from understudy.dataplane.memory.rows import StoredRow
from understudy.errors import DataPlaneError
from understudy.observability.faults import point

FAULT_VARIABLE = "UNDERSTUDY_FAULT"
_PAGE = 4096
_PAGES_PER_COMMIT = 5


class Changes:
    """What one transaction will write. Filled on the event loop; not changed after the hand-over.

    `await` it (see `Journal.durable`) until it is committed. The await first yields to the event loop once,
    which is enough for a small batch; a future is made only if the commit takes longer.
    """

    __slots__ = (
        "awaited",
        "dirty",
        "error",
        "facts",
        "grouped_lines",
        "lines",
        "over",
        "packs",
        "packs_gone",
        "rows_gone",
        "segment",
        "size",
        "spills",
        "spills_gone",
        "then",
        "trained",
        "waiters",
    )

    def __init__(self) -> None:
        self.dirty: dict[int, StoredRow] = {}
        """Rows whose `rows` entry changed; written with their values at the hand-over."""
        self.lines: list[Any] = []
        """Values of `rows` entries as one flat list."""
        self.grouped_lines: list[Any] = []
        """The same for rows of a group, with its name and policy."""
        self.packs: list[Any] = []
        """Id and body of each pack, as one flat list."""
        self.spills: list[tuple[int, SpillRef, bytes]] = []
        """(pack, reference, frame)."""
        self.facts: defaultdict[tuple[str, str, int, str | None], list[str]] = defaultdict(list)
        """Ledger events: (kind, partition, step, detail) → keys."""
        self.trained: dict[int, list[int]] = {}
        """Step → ids of rows acked in it."""
        self.packs_gone: list[int] = []
        """Ids of rows that keep their `rows` entry and lose their columns."""
        self.rows_gone: list[int] = []
        self.spills_gone = False
        self.size = 0
        """Approximate bytes of the commit, without spill frames."""
        self.segment = 0
        """The spill segment at the hand-over; earlier segments hold committed frames only."""
        self.awaited = False
        self.over = False
        """Committed, or failed with `error`."""
        self.error: BaseException | None = None
        self.waiters: list[asyncio.Future[None]] = []
        self.then: list[Callable[[], None]] = []
        """Run on the event loop after the commit."""

    def empty(self) -> bool:
        return not (self.dirty or self.facts or self.packs or self.awaited)

    def __await__(self) -> Generator[Any, None, None]:
        yield  # the hand-over was scheduled before this task's next turn
        if not self.over:
            waiter = asyncio.get_running_loop().create_future()
            self.waiters.append(waiter)
            yield from waiter
        if self.error is not None:
            raise self.error

    def end(self, error: BaseException | None) -> None:
        """Record the outcome and wake all waiters."""
        self.over, self.error = True, error
        if error is None:
            for action in self.then:
                action()
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(None)

    def seal(self, segment: int) -> None:
        """Called at the hand-over: copy the current values of all dirty rows."""
        for row in self.dirty.values():
            group = row.group
            if group is None:
                self.lines += row.line()
            else:
                self.grouped_lines += (*row.line(), group.name, group.policy.value)
        self.segment = segment
        self.size = 150 * len(self.dirty) + sum(map(len, self.packs[1::2]))
        for keys in self.facts.values():
            self.size += 30 * len(keys)


def _as_json(keys: list[str]) -> str:
    return msgspec.json.encode(keys).decode()


def _no_point(name: str) -> None:
    """Stands in for `point` where fault injection is off."""


class Writer:
    """The SQLite connection. Called by `Journal`, on the event loop or its thread, never on both at once."""

    def __init__(self, folder: Path, spill: SpillFiles) -> None:
        self.file = folder / schema.FILE_NAME
        self.spill = spill
        self.connection = schema.connect(self.file)
        self._cursor = self.connection.cursor()
        """Reused for all commits: making a cursor costs as much as many statements do."""
        self.failure: DataPlaneError | None = None
        self.log_bytes = 0
        """Approximate size of the write-ahead log."""
        self._point = point if FAULT_VARIABLE in os.environ else _no_point
        """Chosen once: a commit passes three fault points, and reading the environment is slow."""

    def failed(self, what: str, error: BaseException) -> DataPlaneError:
        return DataPlaneError(
            f"the journal {self.file} cannot be {what}: {error}; "
            "what was acknowledged is safe: free space or mend the disk, then resume"
        )

    def commit(self, batch: Changes) -> None:
        if self.failure is not None:
            raise self.failure
        cursor = self._cursor
        try:
            if batch.spills:
                point("journal.before_spill")
                for _, ref, frame in batch.spills:
                    self.spill.write(ref, frame)
            self._point("journal.before_begin")
            cursor.execute("BEGIN IMMEDIATE")
            self._write(cursor, batch)
            self._point("journal.before_commit")
            cursor.execute("COMMIT")
            self._point("journal.after_commit")
        except BaseException as error:
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")
            self.failure = self.failed("written", error)
            raise self.failure from error
        self.log_bytes += _PAGES_PER_COMMIT * _PAGE + 2 * batch.size
        if batch.spills_gone:
            self.sweep(batch.segment)

    @staticmethod
    def _write(cursor: sqlite3.Cursor, batch: Changes) -> None:
        """Insert rows first, then updates, then deletions: one row may have all of them in one batch."""
        insert_many = schema.insert_many
        if batch.lines:
            insert_many(cursor, schema.INSERT_ROWS, 8, batch.lines)
        if batch.grouped_lines:
            insert_many(cursor, schema.INSERT_GROUPED_ROWS, 10, batch.grouped_lines)
        if batch.packs:
            insert_many(cursor, schema.INSERT_PACKS, 2, batch.packs)
        if batch.spills:
            spills = [value for pack, ref, _ in batch.spills for value in (pack, ref.segment)]
            insert_many(cursor, schema.INSERT_SPILLS, 2, spills)
        bare: list[Any] = []
        detailed: list[Any] = []
        for (kind, part, step, detail), keys in batch.facts.items():
            names = _as_json(keys)
            if detail is None:
                bare += (kind, 1, part, step, names)
            else:
                detailed += (kind, 1, part, step, names, detail)
        if bare:
            insert_many(cursor, schema.INSERT_EVENTS, 5, bare)
        if detailed:
            insert_many(cursor, schema.INSERT_EVENTS_WITH_DETAIL, 6, detailed)
        for step, ids in batch.trained.items():
            for first, last in schema.runs(ids):
                cursor.execute("UPDATE rows SET trained=? WHERE id BETWEEN ? AND ?", (step, first, last))
        if batch.packs_gone:
            schema.delete_packs(cursor, batch.packs_gone)
        if batch.rows_gone:
            schema.delete_rows(cursor, batch.rows_gone)

    def sweep(self, below: int) -> None:
        """Delete spill segments that no pack refers to."""
        point("journal.before_sweep")
        found = self.connection.execute("SELECT DISTINCT segment FROM spills").fetchall()
        self.spill.keep_only((segment for (segment,) in found), below)

    def checkpoint(self) -> None:
        """Checkpoint the write-ahead log into the tables; it is then overwritten from its start."""
        point("journal.before_checkpoint")
        self.connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        self.log_bytes = 0

    def flush(self) -> None:
        """Flush to disk, against a power cut. The log holds every commit since the last checkpoint, which
        SQLite flushes itself."""
        self.spill.sync()
        for path in (self.file.with_name(self.file.name + "-wal"), self.file.parent):
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    def close(self) -> None:
        if self.failure is None:
            with suppress(sqlite3.OperationalError):  # the log stays, and the next open reads it
                self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        self.connection.close()
