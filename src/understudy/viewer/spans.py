"""When which span ran: lane, start and end of every span in memory (34 bytes each), the rest by offset.

A lane is the span's name; that of a score is `score TEACHER/REPLICA`. Times count from the start of a launch. A
resumed run appends the spans of its next launch, whose times begin at zero again; launches are laid end to end.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from understudy.observability.lines import GrowingFile, line_at, record

ROW_SPANS = ("rollout", "reward", "score")
"""Spans of single rows; all others are the trainer's own."""
MOST_SPANS = 1500
"""Spans of one answer; more are given as counts."""
BINS = 240


def _lane(span: Mapping[str, Any]) -> str:
    if span["name"] != "score":
        return str(span["name"])
    return f"score {span.get('teacher', '')}/{span.get('replica', '')}".rstrip("/ ")


def _of_rows(lane: str) -> bool:
    return lane in ROW_SPANS or lane.startswith("score ")


def _most_at_once(start: np.ndarray, end: np.ndarray, edges: np.ndarray) -> list[int]:
    """How many spans ran at the same time, at most, in each bin."""
    start, end = np.sort(start), np.sort(end)
    most = np.searchsorted(start, edges[:-1], "right") - np.searchsorted(end, edges[:-1], "left")
    # The number changes upwards only where a span begins. A span without length runs too.
    running = np.maximum(1, np.arange(1, len(start) + 1) - np.searchsorted(end, start, "right"))
    inside = (start >= edges[0]) & (start <= edges[-1])
    bins = np.minimum(np.searchsorted(edges, start[inside], "right") - 1, len(most) - 1)
    np.maximum.at(most, bins, running[inside])
    return most.tolist()


class SpanIndex:
    def __init__(self, path: Path) -> None:
        self._file = GrowingFile(path, self._forget)
        self._forget()

    def _forget(self) -> None:
        self._names: dict[str, int] = {}
        self._name, self._start, self._end = array("h"), array("d"), array("d")
        self._offset, self._length = array("q"), array("l")
        self._shift = self._latest = 0.0
        self.launches: list[float] = [0.0]

    def look(self, most: int) -> bool:
        """Reads on; whether there may be more."""
        before = self._file.place
        for offset, line in self._file.new_lines(most):
            span = record(line)
            if span is None or not isinstance(span.get("name"), str):
                continue
            try:
                start, end = float(span["start"]), float(span["end"])
            except (KeyError, TypeError, ValueError):
                continue
            if span["name"] == "launch":
                if self._latest > self._shift:
                    self._begin_launch()
                continue
            # Runs of older versions have no line for a launch.
            if end + self._shift < self._latest - 1.0 and end < self._latest - self._shift:
                self._begin_launch()
            self._name.append(self._names.setdefault(_lane(span), len(self._names)))
            self._start.append(start + self._shift)
            self._end.append(end + self._shift)
            self._offset.append(offset)
            self._length.append(len(line))
            self._latest = max(self._latest, end + self._shift)
        return self._file.place - before >= most

    def _begin_launch(self) -> None:
        self._shift = self._latest
        self.launches.append(self._shift)

    def window(self, first: float | None, last: float | None) -> dict[str, Any]:
        """Spans between two moments: the trainer's own one by one, rows' as the largest number at the
        same time in each of `BINS` parts; one by one too where they are few."""
        if not len(self._start):
            return {"from": 0, "to": 0, "end": 0, "launches": [], "spans": [], "counts": {}}
        start, end = np.frombuffer(self._start), np.frombuffer(self._end)
        name = np.frombuffer(self._name, np.int16)
        finish = self._latest
        last = finish if last is None else last
        first = max(0.0, finish - 30.0) if first is None else first
        inside = np.flatnonzero((end >= first) & (start <= last))
        names = {number: word for word, number in self._names.items()}
        lanes = sorted(
            filter(_of_rows, self._names), key=lambda lane: (ROW_SPANS.index(lane.split()[0]), lane)
        )
        of_rows = np.isin(name[inside], [self._names[lane] for lane in lanes])
        counts = {}
        for lane in lanes:
            mine = inside[name[inside] == self._names[lane]]
            if len(mine):
                counts[lane] = _most_at_once(start[mine], end[mine], np.linspace(first, last, BINS + 1))
        single = inside if len(inside) <= MOST_SPANS else inside[~of_rows]
        if len(single) > MOST_SPANS:  # the longest are seen, the others would be narrower than a pixel
            single = single[np.argsort(start[single] - end[single], kind="stable")[:MOST_SPANS]]
        spans: list[dict[str, Any]] = [
            {"name": names[int(name[i])], "start": float(start[i]), "end": float(end[i]), "at": int(i)}
            for i in np.sort(single)
        ]
        for one in spans:
            if _of_rows(one["name"]) or len(spans) <= 200 or one["name"] == "event":
                one["about"] = self.about(one["at"])
        bounds = {"from": first, "to": last, "end": finish, "launches": self.launches}
        return {**bounds, "spans": spans, "counts": counts}

    def about(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self._offset):
            return {}
        found = line_at(self._file.path, self._offset[index], self._length[index]) or {}
        return {key: value for key, value in found.items() if key not in ("name", "start", "end")}

    def of_key(self, key: str) -> list[dict[str, Any]]:
        return self.of_keys([key])[key]

    def of_keys(self, keys: Sequence[str], most: int = 64) -> dict[str, list[dict[str, Any]]]:
        """The spans of some rows. Searches the file's bytes, so it costs a read of the whole file."""
        found: dict[str, list[dict[str, Any]]] = {key: [] for key in keys}
        wanted = re.compile(b'"key":"(' + b"|".join(re.escape(key.encode()) for key in keys) + b')"')
        offsets = np.frombuffer(self._offset, np.int64)
        names = {number: word for word, number in self._names.items()}
        try:
            handle = self._file.path.open("rb")
        except OSError:
            return found
        keep = max((len(key.encode()) for key in keys), default=0) + len('"key":""') - 1
        with handle:
            base, carried = 0, b""
            while piece := handle.read(4 << 20):
                block = carried + piece
                for hit in wanted.finditer(block):
                    i = int(np.searchsorted(offsets, base + hit.start(), "right")) - 1
                    mine = found[hit[1].decode()]
                    if i >= 0 and len(mine) < most:
                        span = {"name": names[self._name[i]], "start": self._start[i], "end": self._end[i]}
                        mine.append({**span, "about": self.about(i)})
                carried = block[-keep:]
                base += len(block) - len(carried)
        return found
