"""Rows that the journal still holds, with their token columns: of a live run, or of one that was killed.

A live journal is opened read-only for one short transaction at a time, as SQLite's log allows beside its
writer. SQLite would write to the folder of a journal without a writer (it recovers the log), so the journal of a
run that is over is copied to a temporary folder first, and so is one whose writer is on another machine.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np

from understudy.dataplane.frame import SpillRef, decode, unpack
from understudy.dataplane.journal.schema import FILE_NAME, PACK_SHIFT
from understudy.dataplane.token_measures import measures, worst_tokens
from understudy.errors import DataPlaneError

MOST_COPY = 2 << 30
"""A journal above this size is not copied; its rows are not shown."""
MOST_SPILL = 64 << 20
_AT_ONCE = 64

Columns = dict[str, Any]


class JournalRows:
    """Closed by the garbage collector together with its temporary folder."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / FILE_NAME
        self._spill = folder / "spill"
        self._copy: tempfile.TemporaryDirectory[str] | None = None
        self._copied: tuple[int, int] | None = None

    def rows(self, live: bool, after: int) -> Iterator[tuple[int, str, dict[str, Any], Columns]]:
        """(id, key, tags, columns) of rows in flight that were written, in order of ids above `after`. The
        columns of a trained row are gone with its ack."""
        last = after
        while True:
            with closing(self._open(live)) as database:
                found = database.execute(
                    "SELECT id, key, tags, step FROM rows WHERE id > ? AND trained IS NULL AND status != 'pending' "
                    "ORDER BY id LIMIT ?",
                    (last, _AT_ONCE),
                ).fetchall()
                packs = {row[0]: self._packs(database, row[0]) for row in found}
            if not found:
                return
            for number, key, tags, step in found:
                last = number
                columns = self._columns(packs[number])
                if "tokens" in columns:
                    yield number, key, {"step": step, **json.loads(tags)}, columns

    def one(self, live: bool, number: int) -> Columns | None:
        with closing(self._open(live)) as database:
            packs = self._packs(database, number)
        return self._columns(packs) if packs else None

    def _open(self, live: bool) -> sqlite3.Connection:
        file = self._file if live else self._copied_file()
        try:
            return sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True, timeout=2.0)
        except sqlite3.Error as error:
            raise DataPlaneError(f"{self._file} cannot be opened: {error}") from None

    def _copied_file(self) -> Path:
        log = self._file.with_name(self._file.name + "-wal")
        sizes = (self._file.stat().st_size, log.stat().st_size if log.exists() else 0)
        if self._copy is None or self._copied != sizes:
            if sum(sizes) > MOST_COPY:
                raise DataPlaneError(
                    f"{self._file} has {sum(sizes)} bytes; journals up to {MOST_COPY} are shown"
                )
            self._copy = tempfile.TemporaryDirectory(prefix="understudy-view-")
            for path in (self._file, log):
                with suppress(FileNotFoundError):
                    shutil.copyfile(path, Path(self._copy.name) / path.name)
            self._copied = sizes
        return Path(self._copy.name) / self._file.name

    @staticmethod
    def _packs(database: sqlite3.Connection, number: int) -> list[bytes]:
        bounds = (number << PACK_SHIFT, (number + 1) << PACK_SHIFT)
        found = database.execute("SELECT body FROM packs WHERE id >= ? AND id < ? ORDER BY id", bounds)
        return [body for (body,) in found]

    def _columns(self, packs: list[bytes]) -> Columns:
        frames: dict[str, bytes | SpillRef] = {}
        for body in packs:
            frames |= unpack(body)
        return {name: decode(frame) for name, frame in self._read(frames).items()}

    def _read(self, frames: Mapping[str, bytes | SpillRef]) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for name, frame in frames.items():
            if isinstance(frame, SpillRef):
                if frame.length > MOST_SPILL or name == "teacher_hidden":
                    continue
                try:
                    with (self._spill / f"{frame.segment:08d}.seg").open("rb") as handle:
                        handle.seek(frame.offset)
                        found[name] = handle.read(frame.length)
                except OSError:
                    continue
            else:
                found[name] = frame
        return found


def journal_line(key: str, tags: dict[str, Any], columns: dict[str, Any]) -> dict[str, Any]:
    mask = np.asarray(columns["loss_mask"], bool)
    versions = np.asarray(columns["weight_versions"])[mask]
    drawn = versions[versions >= 0]
    gap = measures(columns).get("gap")
    return {
        "key": key,
        "step": int(tags.get("step") or 0),
        "source": tags.get("data_source"),
        "teacher": columns.get("teacher"),
        "reward": columns.get("reward"),
        "tokens": int(mask.sum()),
        "kl": None if gap is None or not len(gap) else float(gap.mean()),
        "turns": columns.get("turns"),
        "stop_reason": columns.get("stop_reason"),
        "origin": columns.get("origin", "student"),
        "oldest": int(drawn.min()) if len(drawn) else None,
        "newest": int(drawn.max()) if len(drawn) else None,
        "worst": worst_tokens(columns),
        "media": columns.get("media"),
    }


def first_written(columns: dict[str, Any]) -> int:
    mask = np.asarray(columns["loss_mask"], bool)
    return int(mask.argmax()) if mask.any() else len(mask)
