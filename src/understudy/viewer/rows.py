"""The table of rows: figures in memory (about 150 bytes a row), text by offset in the files they were written to.

| kind | from | token columns |
|---|---|---|
| `kept` | kept_rows/STEP.jsonl | yes |
| `journal` | dataplane/journal.sqlite: rows in flight | yes |
| `dump` | rollouts/STEP.jsonl (`run.rollout_dump_every`) | no |
| `held-out` | samples.jsonl: answers of each evaluation | no |

A row of a dump that is kept, or in the journal, is shown once, with its token columns.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from understudy.media.store import is_hash
from understudy.observability.lines import line_at, record

KINDS = ("kept", "journal", "dump", "held-out")
"""Rows that are equal to a sort come in this order: those with token columns first."""
NUMBERS = ("step", "reward", "advantage", "tokens", "kl", "turns", "oldest", "newest", "age")
LABELS = ("kind", "source", "teacher", "stop_reason", "origin")
_FIELD_NAMES = (
    " key prompt completion text reward stop_reason origin turns tokens teacher kl offset length crc worst "
)
_BLOCK = 8 << 20
MOST_WORST = 200
MOST_PICTURES = 32
"""Of one row; an agent's session may hold more."""
MOST_TEXT = 400
"""Characters of a prompt or answer beside others."""


@dataclass(slots=True)
class Chunk:
    """Rows of one file, or journal rows read at one time."""

    kind: str
    name: int
    """The file's step; 0 for samples.jsonl and the journal."""
    path: Path | None
    keys: list[str] = field(default_factory=list)
    numbers: list[list[float]] = field(default_factory=list)
    labels: list[list[int]] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)
    """(offset, length) of the row's line; (id, 0) in the journal."""
    prompts: list[int] = field(default_factory=list)
    """Checksum of the prompt's text and pictures: equal prompts are found by it."""
    worst: list[list[Any]] = field(default_factory=list)
    text: list[tuple[str, str]] = field(default_factory=list)
    """(prompt, completion) of journal rows, which are in no file as text."""
    media: list[list[str]] = field(default_factory=list)
    """Pictures of journal rows."""
    _columns: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None

    def columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Numbers, labels and prompts as arrays, made again when rows were added."""
        if self._columns is None or len(self._columns[0]) != len(self.keys):
            numbers, labels = np.array(self.numbers, np.float64), np.array(self.labels, np.int32)
            self._columns = numbers, labels, np.array(self.prompts, np.uint32)
        return self._columns


class RowTable:
    """Used under the lock of its run."""

    def __init__(self) -> None:
        self.chunks: dict[tuple[str, int], Chunk] = {}
        self._codes: dict[str, int] = {"": 0}
        self._arrays: dict[str, Any] | None = None

    def replace(self, chunk: Chunk) -> None:
        self.chunks[chunk.kind, chunk.name] = chunk
        self._arrays = None

    def touched(self) -> None:
        self._arrays = None

    def __len__(self) -> int:
        return sum(len(chunk.keys) for chunk in self.chunks.values())

    def add(self, chunk: Chunk, line: dict[str, Any], place: tuple[int, int]) -> None:
        newest, trained = line.get("newest"), line.get("step", chunk.name)
        age = trained - 1 - newest if isinstance(newest, int) and newest >= 0 and trained else None
        values = {**line, "step": trained, "age": line.get("age", age)}
        chunk.numbers.append([_number(values.get(name)) for name in NUMBERS])
        values |= {"kind": chunk.kind, "source": line.get("source") or line.get("data_source")}
        chunk.labels.append([self._code(values.get(name)) for name in LABELS])
        chunk.keys.append(str(line.get("key", "")))
        chunk.places.append(place)
        asked = "".join([str(line.get("prompt", "")), *media_of(line)])
        chunk.prompts.append(zlib.crc32(asked.encode("utf-8", "replace")))
        chunk.worst.append(line.get("worst") or [])

    def _code(self, word: Any) -> int:
        return self._codes.setdefault("" if word is None else str(word), len(self._codes))

    def read_file(self, kind: str, step: int, path: Path) -> None:
        chunk = Chunk(kind, step, path)
        try:
            with path.open("rb") as handle:
                place = 0
                for line in handle:
                    found = record(line)
                    if found is not None:
                        self.add(chunk, {"step": step, **found}, (place, len(line)))
                    place += len(line)
        except OSError:
            return
        self.replace(chunk)

    def arrays(self) -> dict[str, Any]:
        """All chunks as columns; rebuilt after a change, from pieces that are made once per chunk."""
        if self._arrays is None:
            chunks = [chunk for chunk in self.chunks.values() if chunk.keys]
            chunks.sort(key=lambda chunk: KINDS.index(chunk.kind))
            pieces = [chunk.columns() for chunk in chunks]
            kept, journal = (self._steps_and_keys(chunks, kind) for kind in ("kept", "journal"))
            twins = {"dump": kept | journal, "journal": kept}
            steps = {step for step, _ in twins["dump"]}
            hidden = [self._hidden(chunk, twins.get(chunk.kind, set()), steps) for chunk in chunks]
            self._arrays = {
                "chunks": chunks,
                "chunk": np.repeat(np.arange(len(chunks)), [len(chunk.keys) for chunk in chunks]),
                "row": np.concatenate([np.arange(len(chunk.keys)) for chunk in chunks] or [np.zeros(0, int)]),
                "hidden": np.concatenate(hidden or [np.zeros(0, bool)]),
                "numbers": np.concatenate([one[0] for one in pieces] or [np.zeros((0, len(NUMBERS)))]),
                "labels": np.concatenate(
                    [one[1] for one in pieces] or [np.zeros((0, len(LABELS)), np.int32)]
                ),
                "prompt": np.concatenate([one[2] for one in pieces] or [np.zeros(0, np.uint32)]),
            }
        return self._arrays

    @staticmethod
    def _hidden(chunk: Chunk, twins: set[tuple[int, str]], steps: set[int]) -> np.ndarray:
        """Which rows are hidden, because a source with more columns shows the same row (`twins`). A dump holds rows of one
        step."""
        if not twins or (chunk.kind == "dump" and chunk.name not in steps):
            return np.zeros(len(chunk.keys), bool)
        rows = zip(chunk.columns()[0][:, 0].tolist(), chunk.keys, strict=True)
        return np.fromiter(((int(step), key) in twins for step, key in rows), bool, len(chunk.keys))

    @staticmethod
    def _steps_and_keys(chunks: Sequence[Chunk], kind: str) -> set[tuple[int, str]]:
        return {
            (int(numbers[0]), key)
            for chunk in chunks
            if chunk.kind == kind
            for numbers, key in zip(chunk.numbers, chunk.keys, strict=True)
            if numbers[0] == numbers[0]
        }

    def select(
        self,
        *,
        labels: dict[str, str],
        ranges: dict[str, tuple[float | None, float | None]],
        text: str,
        sort: str,
        descending: bool,
        offset: int,
        limit: int,
    ) -> dict[str, Any]:
        """One page of the rows that pass every filter, and how many there are."""
        table = self.arrays()
        wanted = ~table["hidden"]
        for name, word in labels.items():
            wanted &= table["labels"][:, LABELS.index(name)] == self._codes.get(word, -1)
        for name, (low, high) in ranges.items():
            column = table["numbers"][:, NUMBERS.index(name)]
            if low is not None:
                wanted &= column >= low
            if high is not None:
                wanted &= column <= high
        if text:
            wanted &= self._matches(text)
        found = np.flatnonzero(wanted)
        if sort in NUMBERS:
            column = table["numbers"][found, NUMBERS.index(sort)]
            missing = np.isnan(column)
            order = np.lexsort(
                (np.arange(len(found)), np.nan_to_num(-column if descending else column), missing)
            )
            found = found[order]
        elif descending:
            found = found[::-1]
        rows = [self.summary(int(i)) for i in found[offset : offset + limit]]
        return {"total": len(found), "of": int((~table["hidden"]).sum()), "rows": rows}

    def summary(self, index: int, snippet: int = 160) -> dict[str, Any]:
        table = self.arrays()
        chunk, row = table["chunks"][table["chunk"][index]], int(table["row"][index])
        found: dict[str, Any] = {"id": row_id(chunk, row), "key": chunk.keys[row]}
        found |= {name: _plain(value) for name, value in zip(NUMBERS, chunk.numbers[row], strict=True)}
        names = list(self._codes)
        found |= {name: names[code] for name, code in zip(LABELS, chunk.labels[row], strict=True)}
        prompt, completion = self.text(chunk, row)
        found |= {"prompt": prompt[-snippet:], "completion": completion[:snippet]}
        media = chunk.media[row] if chunk.text else media_of(self.line(chunk, row))
        return found | {"media": media[:MOST_PICTURES]}

    def line(self, chunk: Chunk, row: int) -> dict[str, Any]:
        offset, length = chunk.places[row]
        return (line_at(chunk.path, offset, length) if chunk.path else None) or {}

    def text(self, chunk: Chunk, row: int) -> tuple[str, str]:
        if chunk.text:
            return chunk.text[row]
        line = self.line(chunk, row)
        return str(line.get("prompt", "")), str(line.get("completion", line.get("text", "")))

    def find(self, wanted: str) -> tuple[Chunk, int] | None:
        kind, _, rest = wanted.partition(":")
        name, _, place = rest.partition(":")
        try:
            chunk, offset = self.chunks.get((kind, int(name))), int(place)
        except ValueError:
            return None
        if chunk is None:
            return None
        row = next((i for i, (at, _) in enumerate(chunk.places) if at == offset), None)
        return None if row is None else (chunk, row)

    def choices(self) -> dict[str, list[str]]:
        """The values that each label takes."""
        table, names = self.arrays(), list(self._codes)
        return {
            name: sorted(names[code] for code in np.unique(table["labels"][:, column]) if names[code])
            for column, name in enumerate(LABELS)
        }

    def same_prompt(self, checksum: int, most: int = 200) -> list[dict[str, Any]]:
        table = self.arrays()
        found = np.flatnonzero((table["prompt"] == checksum) & ~table["hidden"])
        return [self.summary(int(i), 60) for i in found[:most]]

    def spread(self, kind: str, most: int) -> list[dict[str, Any]]:
        """Rows of a kind: half of `most` are those with the largest KL, the others lie over all steps."""
        table = self.arrays()
        mine = np.flatnonzero((table["labels"][:, 0] == self._codes.get(kind, -1)) & ~table["hidden"])
        kl = np.nan_to_num(table["numbers"][mine, NUMBERS.index("kl")], nan=-np.inf)
        worst = mine[np.argsort(-kl, kind="stable")[: most // 2]]
        others = np.setdiff1d(mine, worst)
        others = others[np.argsort(table["numbers"][others, 0], kind="stable")]
        picked = others[
            np.unique(np.linspace(0, len(others) - 1, min(len(others), most - len(worst))).astype(int))
        ]
        chosen = np.concatenate([worst, picked]).astype(int)
        return [self.summary(int(i), MOST_TEXT) | {"prompt_sum": int(table["prompt"][i])} for i in chosen]

    def answers(self, each: int) -> list[dict[str, Any]]:
        """Held-out answers to a few prompts of each source: the student's first and last, and the teacher's."""
        chunk = self.chunks.get(("held-out", 0))
        if chunk is None or not chunk.keys:
            return []
        numbers, labels, prompts = chunk.columns()
        steps, own = numbers[:, 0], labels[:, LABELS.index("teacher")] == 0
        if not own.any():
            return []
        first, last = steps[own].min(), steps[own].max()
        shown: dict[int, int] = {}
        found = []
        for row in np.flatnonzero(own & (steps == last)).tolist():
            source = int(labels[row, LABELS.index("source")])
            if shown.setdefault(source, 0) >= each:
                continue
            shown[source] += 1
            same = np.flatnonzero(prompts == chunk.prompts[row])
            twins = [i for i in same.tolist() if chunk.keys[i] == chunk.keys[row]]
            before = next((i for i in twins if own[i] and steps[i] == first < last), None)
            teacher = next((i for i in twins if not own[i]), None)
            line = self.line(chunk, row)
            found.append(
                {
                    "source": list(self._codes)[source],
                    "prompt": str(line.get("prompt", ""))[-MOST_TEXT:],
                    "answer": line.get("answer"),
                    "before": self._answer(chunk, before),
                    "after": self._answer(chunk, row) if last > 0 else None,
                    "teacher": self._answer(chunk, teacher),
                }
            )
            if last == 0:
                found[-1]["before"] = self._answer(chunk, row)
        return sorted(found, key=lambda one: str(one["source"]))

    def _answer(self, chunk: Chunk, row: int | None) -> dict[str, Any] | None:
        if row is None:
            return None
        line = self.line(chunk, row)
        return {"text": str(line.get("text", ""))[:MOST_TEXT], "reward": line.get("reward") or 0}

    def worst(self, step: int | None) -> list[tuple[str, str, int, list[Any]]]:
        """(row id, key, step, token) of the tokens with the largest gaps, of one step or of all."""
        found = []
        for chunk in self.chunks.values():
            for row, tokens in enumerate(chunk.worst):
                at = int(chunk.numbers[row][0])
                if tokens and step in (None, at):
                    found += [(row_id(chunk, row), chunk.keys[row], at, token) for token in tokens]
        found.sort(key=lambda one: -one[3][2])
        return found[:MOST_WORST]

    def _matches(self, text: str) -> np.ndarray:
        """Rows whose text contains `text`, whatever the case. Reads files in blocks and decodes no line,
        unless `text` also occurs in names of fields."""
        table = self.arrays()
        found = np.zeros(len(table["row"]), bool)
        # As JSON writes it, with letters of other scripts as they are or escaped; both occur.
        needles = {json.dumps(text, ensure_ascii=escaped)[1:-1].encode().lower() for escaped in (True, False)}
        verify, start = text.lower() in _FIELD_NAMES, 0
        for chunk in table["chunks"]:
            count = len(chunk.keys)
            if chunk.text:
                hits: Sequence[int] = [
                    row for row, parts in enumerate(chunk.text) if any(text.lower() in one.lower() for one in parts)
                ]  # fmt: skip
            else:
                hits = _lines_with(chunk, needles)
            for row in hits:
                if not verify or any(text.lower() in one.lower() for one in self.text(chunk, row)):
                    found[start + row] = True
            start += count
        return found


def media_of(line: dict[str, Any]) -> list[str]:
    """Hashes of a row's pictures; anything else in its place is left out."""
    found = line.get("media")
    return [one for one in found if isinstance(one, str) and is_hash(one)] if isinstance(found, list) else []


def _lines_with(chunk: Chunk, needles: set[bytes]) -> list[int]:
    offsets = np.array([place for place, _ in chunk.places], np.int64)
    rows: set[int] = set()
    for base, block in _blocks(chunk.path, max(map(len, needles))):
        for needle in needles:
            at = block.find(needle)
            while at >= 0:
                rows.add(int(np.searchsorted(offsets, base + at, "right")) - 1)
                at = block.find(b"\n", at)  # one hit a line is enough
                at = block.find(needle, at) if at >= 0 else -1
    return sorted(row for row in rows if row >= 0)


def _blocks(path: Path | None, overlap: int) -> Iterator[tuple[int, bytes]]:
    try:
        handle = path.open("rb") if path else None
    except OSError:
        handle = None
    if handle is None:
        return
    with handle:
        base, kept = 0, b""
        while piece := handle.read(_BLOCK):
            block = kept + piece.lower()
            yield base, block
            kept = block[-overlap:]
            base += len(block) - len(kept)


def row_id(chunk: Chunk, row: int) -> str:
    return f"{chunk.kind}:{chunk.name}:{chunk.places[row][0]}"


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _plain(value: float) -> float | int | None:
    if math.isnan(value):
        return None
    return int(value) if value == int(value) else value
