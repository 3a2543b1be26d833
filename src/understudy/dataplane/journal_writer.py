"""One transaction: what it writes, and the writing of it. Used by one thread at a time."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from understudy.dataplane import journal_schema as schema
from understudy.dataplane.frame import SpillRef
from understudy.dataplane.rows import Row
from understudy.dataplane.spill import SpillFiles
from understudy.errors import DataPlaneError
from understudy.observability.faults import point

_PAGE = 4096
_PAGES_PER_COMMIT = 5


@dataclass(slots=True)
class Changes:
    """What one transaction will write. Filled on the event loop; no longer touched once handed over."""

    dirty: dict[int, Row] = field(default_factory=dict)
    """Rows whose line changed; written as they are when the batch is handed over."""
    lines: list[tuple[Any, ...]] = field(default_factory=list)
    packs: list[tuple[int, bytes]] = field(default_factory=list)
    spills: list[tuple[int, SpillRef, bytes]] = field(default_factory=list)
    """(pack, place, frame)."""
    facts: dict[tuple[str, str, int, str | None], list[str]] = field(default_factory=dict)
    """(kind, partition, step, detail) → the keys it became true of."""
    trained: dict[int, list[int]] = field(default_factory=dict)
    """Step → ids of rows acked in it."""
    packs_gone: list[int] = field(default_factory=list)
    """Ids of rows that keep their line and lose their columns."""
    rows_gone: list[int] = field(default_factory=list)
    spills_gone: bool = False
    size: int = 0
    """About how many bytes the commit writes, spill frames aside."""
    segment: int = 0
    """The spill segment current when this was handed over; earlier ones hold committed frames only."""
    waiters: list[asyncio.Future[None]] = field(default_factory=list)
    then: list[Callable[[], None]] = field(default_factory=list)
    """Run on the event loop after the commit."""

    def note(
        self, kind: str, partition: str, step: int, keys: Iterable[str], detail: str | None = None
    ) -> None:
        """A line of the ledger."""
        fact = (kind, partition, step, detail)
        known = self.facts.get(fact)
        if known is None:
            self.facts[fact] = list(keys)
        else:
            known.extend(keys)

    def empty(self) -> bool:
        return not (self.dirty or self.facts or self.packs or self.waiters)

    def seal(self, segment: int) -> None:
        """Handed over: fix the lines as they are now."""
        self.lines = [row.line() for row in self.dirty.values()]
        self.segment = segment
        self.size = 150 * len(self.lines) + sum([len(body) for _, body in self.packs])
        for keys in self.facts.values():
            self.size += 30 * len(keys)


class Writer:
    def __init__(self, folder: Path, spill: SpillFiles) -> None:
        self.file = folder / schema.FILE_NAME
        self.spill = spill
        self.connection = schema.connect(self.file)
        self.failure: DataPlaneError | None = None
        self.log_bytes = 0
        """About how much the write-ahead log holds."""

    def commit(self, batch: Changes) -> None:
        if self.failure is not None:
            raise self.failure
        connection = self.connection
        try:
            if batch.spills:
                point("journal.before_spill")
                for _, ref, frame in batch.spills:
                    self.spill.write(ref, frame)
            point("journal.before_begin")
            connection.execute("BEGIN IMMEDIATE")
            self._write(connection, batch)
            point("journal.before_commit")
            connection.execute("COMMIT")
            point("journal.after_commit")
        except BaseException as error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            self.failure = DataPlaneError(
                f"the journal {self.file} cannot be written: {error}; "
                "what was acknowledged is safe: free space or mend the disk, then resume"
            )
            raise self.failure from error
        self.log_bytes += _PAGES_PER_COMMIT * _PAGE + 2 * batch.size
        if batch.spills_gone:
            self.sweep(batch.segment)

    @staticmethod
    def _write(connection: sqlite3.Connection, batch: Changes) -> None:
        """Rows before the marks on them, everything before the deletions: one row may have all of them in one batch."""
        schema.insert_many(connection, schema.INSERT_ROWS, batch.lines)
        schema.insert_many(connection, schema.INSERT_PACKS, batch.packs)
        if batch.spills:
            spills = [(pack, ref.segment) for pack, ref, _ in batch.spills]
            schema.insert_many(connection, schema.INSERT_SPILLS, spills)
        schema.insert_many(
            connection,
            schema.INSERT_EVENTS,
            [
                (kind, 1, home, step, told, json.dumps(keys))
                for (kind, home, step, told), keys in batch.facts.items()
            ],
        )
        for step, ids in batch.trained.items():
            for first, last in schema.runs(ids):
                connection.execute("UPDATE rows SET trained=? WHERE id BETWEEN ? AND ?", (step, first, last))
        if batch.packs_gone:
            schema.delete_packs(connection, batch.packs_gone)
        if batch.rows_gone:
            schema.delete_rows(connection, batch.rows_gone)

    def sweep(self, below: int) -> None:
        """Delete spill segments nobody refers to."""
        point("journal.before_sweep")
        found = self.connection.execute("SELECT DISTINCT segment FROM spills").fetchall()
        self.spill.keep_only((segment for (segment,) in found), below)

    def checkpoint(self) -> None:
        """Move the log into the tables; it is then written from its start again."""
        point("journal.before_checkpoint")
        self.connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        self.log_bytes = 0

    def flush(self) -> None:
        """To the disk, against a power cut: the log holds every commit since the last checkpoint, itself flushed."""
        self.spill.sync()
        for path in (self.file.with_name(self.file.name + "-wal"), self.file.parent):
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    def close(self) -> None:
        if self.failure is None:
            self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        self.connection.close()
