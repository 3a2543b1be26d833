"""The dead-letter file: one JSON line per row that could not be made or trained.

The ledger in the journal is the authority; the file is for people and tools. A line is appended after its
commit. The whole file is rewritten from the ledger at every start and rewind, so a crash between commit and append loses
nothing. A line that finds no room is written with the next one, or at the end of the run.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from understudy.observability.faults import point
from understudy.observability.redact import redact, redact_text

logger = logging.getLogger(__name__)

FILE_NAME = "dead_letters.jsonl"
GROUP_LOST = "its group lost"
"""Prefix of the reason of a row that was evicted because another row of its group failed."""


def detail(reason: str, evidence: Mapping[str, Any] | None = None) -> str:
    """The text the ledger stores, with secrets hidden: errors of user code quote URLs. Evidence is only displayed, so
    values that JSON lacks are written as their repr."""
    return json.dumps({"reason": redact_text(reason), "evidence": redact(dict(evidence or {}))}, default=repr)


def kind_of_reason(detail: str) -> str:
    """The reason of a `detail` without what is particular to the row: few enough values to be metric names.

    >>> kind_of_reason(detail("no signal: all 4 rewards are 0")), kind_of_reason(detail("its group lost p7_0_0: DataError: …"))
    ('no_signal', 'group_failed')
    """
    reason = str(json.loads(detail)["reason"])
    if reason.startswith(GROUP_LOST):
        return "group_failed"
    return re.sub(r"\W+", "_", reason.partition(":")[0].strip().lower())[:40] or "unknown"


def count_letters(file: Path, partition: str) -> int:
    """How many rows of the partition have failed. A rewind has just rewritten the file from the ledger."""
    if not file.exists():
        return 0
    with file.open(encoding="utf-8") as lines:
        return sum(json.loads(line)["partition"] == partition for line in lines)


class DeadLetters:
    """Writes the file. Called by `Store` on the event loop."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / FILE_NAME
        self._unwritten: list[str] = []

    def rewrite(self, letters: Iterable[tuple[str, str, int, str]]) -> None:
        """All (partition, key, step, detail), replacing the file in one rename."""
        lines = [self._line(*letter) for letter in letters]
        self._unwritten.clear()
        if not lines and not self._file.exists():
            return
        fresh = self._file.with_suffix(".tmp")
        with fresh.open("w", encoding="utf-8") as out:
            out.writelines(lines)
            out.flush()
            os.fsync(out.fileno())
        fresh.replace(self._file)

    def append(self, partition: str, key: str, step: int, detail: str) -> None:
        point("dead_letters.before_append")
        self._unwritten.append(self._line(partition, key, step, detail))
        self.flush()

    def flush(self) -> None:
        """Append the lines that found no room before."""
        if not self._unwritten:
            return
        try:
            size = self._file.stat().st_size if self._file.exists() else 0
            try:
                with self._file.open("a", encoding="utf-8") as out:
                    out.writelines(self._unwritten)
            except OSError:
                if self._file.is_file():
                    os.truncate(self._file, size)  # a part of a line may be written
                raise
            self._unwritten.clear()
        except OSError as error:
            logger.warning("dead letters in the ledger but not in %s yet: %d; %s", self._file, len(self._unwritten), error)  # fmt: skip

    @staticmethod
    def _line(partition: str, key: str, step: int, detail: str) -> str:
        return json.dumps({"partition": partition, "key": key, "step": step, **json.loads(detail)}) + "\n"
