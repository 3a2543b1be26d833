"""Which file gave which picture of a run: media/sources.jsonl, one line per file.

    {"source": "/data/a.png", "hash": "ab…", "bytes": 812, "changed_ns": 1790000000000000000}

A resumed run uses the copy that it stored, whatever became of the file, so that a row has the same pictures in all
launches. A file that was changed in between is reported once per launch.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from understudy.media.store import MediaStore, hash_of, is_hash

logger = logging.getLogger(__name__)

FILE_NAME = "sources.jsonl"


@dataclass(slots=True)
class PictureSources:
    """Used by the process that reads the dataset."""

    store: MediaStore
    _known: dict[str, dict[str, Any]] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    """Files that are not any more what this run stored."""
    _first: str = ""
    """Written before the next line, after one that was cut off."""

    @staticmethod
    def open(store: MediaStore) -> PictureSources:
        found = PictureSources(store)
        try:
            text = (store.folder / FILE_NAME).read_text()
        except OSError:
            return found
        found._first = "" if text.endswith("\n") else "\n"
        for line in text.splitlines():
            try:
                entry = json.loads(line)
                if is_hash(entry["hash"]):
                    found._known[str(entry["source"])] = entry
            except (ValueError, KeyError, TypeError):
                continue  # a line that the disk had no room for
        return found

    def stored(self, source: str) -> str | None:
        """The hash of the copy that an earlier launch stored; None for a file that it did not read."""
        entry = self._known.get(source)
        if entry is None or not self.store.has(entry["hash"]):
            return None
        stamp = _stamp(source)
        if stamp is not None and stamp != (entry.get("bytes"), entry.get("changed_ns")):
            self._compare(source, entry["hash"])
        return str(entry["hash"])

    def _compare(self, source: str, name: str) -> None:
        try:
            if hash_of(Path(source).read_bytes()) == name:
                return
        except OSError:
            return
        self.changed.append(source)
        logger.warning(
            "the picture %s was changed since this run first read it; the run continues with its own copy, %s. "
            "Start a new run to use the changed picture",
            source,
            self.store.path(name),
        )

    def add(self, source: str, name: str) -> None:
        stamp = _stamp(source)
        if stamp is None:
            return
        entry = {"source": source, "hash": name, "bytes": stamp[0], "changed_ns": stamp[1]}
        self._known[source] = entry
        with (self.store.folder / FILE_NAME).open("a") as file:
            file.write(self._first + json.dumps(entry) + "\n")
        self._first = ""


def _stamp(source: str) -> tuple[int, int] | None:
    try:
        found = Path(source).stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns
