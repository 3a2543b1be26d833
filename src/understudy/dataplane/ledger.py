"""Audit of a run: accounts for every issued row from the journal alone.

    issued = trained + dead-lettered + evicted + in flight,   no key twice

The two sides come from different tables: issued, trained, dead-lettered and evicted rows from the append-only
`events`, rows in flight from `rows`. A row that is missing from one of them is reported. The journal is
opened read-only, in one read transaction, so a running run is not disturbed.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from understudy.dataplane.journal.schema import FILE_NAME, FORMAT, cannot_be_opened, read_meta
from understudy.errors import DataPlaneError

FOLDER_NAME = "dataplane"
"""The data plane's folder in a run directory."""

_NET = """
SELECT partition, key,
    SUM(CASE kind WHEN 'issued' THEN sign ELSE 0 END),
    SUM(CASE kind WHEN 'trained' THEN sign ELSE 0 END),
    SUM(CASE kind WHEN 'dead' THEN sign ELSE 0 END),
    SUM(CASE kind WHEN 'evicted' THEN sign ELSE 0 END)
FROM facts GROUP BY partition, key
"""
_STEPS = "SELECT step, SUM(sign) FROM facts WHERE kind = 'trained' GROUP BY step HAVING SUM(sign) != 0 ORDER BY step"
_REASONS = """
SELECT detail, MAX(CASE WHEN sign > 0 THEN seq END) FROM facts WHERE kind IN ('dead', 'evicted')
GROUP BY partition, key HAVING SUM(sign) > 0
"""
"""The detail of the last event of each key (SQLite takes it from the row that has the maximum)."""


@dataclass(slots=True)
class AuditReport:
    """The result of an audit. Counts are of keys; lists name inconsistent rows as `partition/key`."""

    issued: int = 0
    trained: int = 0
    dead: int = 0
    evicted: int = 0
    in_flight: int = 0
    twice: list[str] = field(default_factory=list)
    """Issued twice, settled twice, or settled and still in flight."""
    lost: list[str] = field(default_factory=list)
    """Issued, never settled, and not in flight."""
    unknown: list[str] = field(default_factory=list)
    """Settled or in flight but never issued."""
    per_step: dict[int, int] = field(default_factory=dict)
    """Rows trained in each step."""
    reasons: dict[str, int] = field(default_factory=dict)
    """Why rows were dead-lettered or evicted."""

    @property
    def balanced(self) -> bool:
        return (
            self.issued == self.trained + self.dead + self.evicted + self.in_flight
            and sum(self.per_step.values()) == self.trained
            and not self.twice
            and not self.lost
            and not self.unknown
        )

    def __str__(self) -> str:
        lines = [
            f"issued {self.issued} = trained {self.trained} + dead-lettered {self.dead} + evicted {self.evicted}"
            f" + in flight {self.in_flight}: {'balanced' if self.balanced else 'NOT BALANCED'}"
        ]
        for name in ("twice", "lost", "unknown"):
            keys = getattr(self, name)
            if keys:
                more = f" and {len(keys) - 5} more" if len(keys) > 5 else ""
                lines.append(f"{name}: {', '.join(keys[:5])}{more}")
        return "\n".join(lines)


class Ledger:
    """Read access to a journal file; every call opens its own connection."""

    def __init__(self, file: Path) -> None:
        self.file = file

    @classmethod
    def read(cls, path: Path) -> Ledger:
        """The ledger of a run directory (or of a data plane folder, or a journal file)."""
        for file in (path, path / FILE_NAME, path / FOLDER_NAME / FILE_NAME):
            if file.is_file():
                return cls(file)
        raise DataPlaneError(
            f"{path} has no journal: neither {FILE_NAME} nor {FOLDER_NAME}/{FILE_NAME} is there"
        )

    def _connect(self) -> sqlite3.Connection:
        address = f"{self.file.resolve().as_uri()}?mode=ro"
        if self._is_closed() and not os.access(self.file.parent, os.W_OK):
            address += "&immutable=1"  # SQLite would make files beside it
        connection = sqlite3.connect(address, uri=True, isolation_level=None)
        try:
            connection.execute("BEGIN")
            found = read_meta(connection, "format", -1)
        except sqlite3.DatabaseError as error:
            connection.close()
            raise cannot_be_opened(self.file, error) from None
        if found != FORMAT:
            connection.close()
            raise DataPlaneError(
                f"{self.file} has journal format {found}; this version reads format {FORMAT}"
            )
        return connection

    def _is_closed(self) -> bool:
        """Whether no process has it open: the last one removes the log beside it."""
        return not self.file.with_name(self.file.name + "-wal").exists()

    def audit(self) -> AuditReport:
        with closing(self._connect()) as connection:
            return _audit(connection)

    def settled(self) -> int:
        """The step before which no rewind can go, because the rows that it would need are deleted; -1: none are."""
        with closing(self._connect()) as connection:
            return read_meta(connection, "settled", -1)

    def trained_keys(self, partition: str) -> Iterator[tuple[int, str]]:
        """(step, key) of every row trained, in the order of training."""
        with closing(self._connect()) as connection:
            yield from connection.execute(
                "SELECT step, key FROM facts WHERE kind = 'trained' AND partition = ? "
                "GROUP BY step, key HAVING SUM(sign) > 0 ORDER BY step, MAX(seq), place",
                (partition,),
            )


def audit(path: Path) -> AuditReport:
    """Account for every row ever issued by the run at `path`."""
    return Ledger.read(path).audit()


def _audit(connection: sqlite3.Connection) -> AuditReport:
    report = AuditReport()
    in_flight = Counter(connection.execute("SELECT partition, key FROM rows WHERE trained IS NULL"))
    report.in_flight = sum(in_flight.values())
    for partition, key, issued, trained, dead, evicted in connection.execute(_NET):
        in_flight_here = in_flight.pop((partition, key), 0)
        report.issued += issued
        report.trained += trained
        report.dead += dead
        report.evicted += evicted
        places = trained + dead + evicted + in_flight_here
        name = f"{partition}/{key}"
        if issued == 0 and places > 0:
            report.unknown.append(name)
        if issued > 1 or places > 1 or min(issued, trained, dead, evicted) < 0:
            report.twice.append(name)
        if issued > 0 and places == 0:
            report.lost.append(name)
    report.unknown += [f"{partition}/{key}" for partition, key in in_flight]
    report.per_step = dict(connection.execute(_STEPS).fetchall())
    reasons = Counter(json.loads(detail)["reason"] for detail, _ in connection.execute(_REASONS))
    report.reasons = dict(reasons.most_common())
    return report
