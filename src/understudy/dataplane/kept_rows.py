"""A bounded sample of trained rows with all their token columns, in the run directory (`run.keep_rows`).

The journal lets a row go once a checkpoint covers it. These files keep some of them for readers:

    kept_rows/000012.rows    packs of columns (`frame.pack`), one after another
    kept_rows/000012.jsonl   one line per row: its summary and where its pack lies (offset, length, crc)
    kept_rows/tokenizer.json the student's tokenizer, so that the folder reads alike on any machine

Which rows: of every step the `A_STEP` rows with the smallest hash of their key, a uniform sample that needs no
random state and repeats after a resume, and the `WORST_A_STEP` rows with the largest mean KL. Over the budget,
the rows with the largest hashes, and the least bad of the worst, are dropped until three quarters are left.
So each drop pays for many steps, and the sample stays uniform within each step. `WORST_SHARE` of the budget
belongs to the worst rows.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import json
import math
import os
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from understudy.dataplane.frame import decode, encode, pack, unpack
from understudy.errors import DataPlaneError
from understudy.observability.faults import point

FOLDER_NAME = "kept_rows"
A_STEP, WORST_A_STEP = 4, 2
WORST_SHARE = 0.25
LEFT_AFTER_DROP = 0.75
STEP_SHARE = 1 / 8
"""A step takes at most this share of the budget."""
MOST_CANDIDATES = 16
"""Candidates kept per token; `tail` keeps the mass outside all the candidates the teacher sent."""


@dataclass(slots=True)
class _Kept:
    step: int
    summary: dict[str, Any]

    @property
    def bytes(self) -> int:
        return int(self.summary["length"]) + 400  # the line beside it

    @property
    def is_worst(self) -> bool:
        return bool(self.summary["why"] == "worst")


def place_of(step: int, key: str) -> float:
    """A number in [0, 1) that depends on the row alone."""
    digest = hashlib.blake2b(f"{step}/{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


def choose(step: int, keys: Sequence[str], kls: Sequence[float | None]) -> dict[int, str]:
    """Index → why, for the rows of a step worth keeping: "sample", "worst", or "both"."""
    sample = heapq.nsmallest(A_STEP, range(len(keys)), key=lambda i: place_of(step, keys[i]))
    known = [i for i, kl in enumerate(kls) if kl is not None and math.isfinite(kl)]
    worst = heapq.nsmallest(WORST_A_STEP, known, key=lambda i: (-(kls[i] or 0.0), keys[i]))
    both = set(sample) & set(worst)
    return {
        i: "both" if i in both else "sample" if i in sample else "worst" for i in sorted({*sample, *worst})
    }


class RowKeeper:
    """Writes the files. One thread at a time; a resumed run continues after `last_step`."""

    def __init__(self, folder: Path, budget: int, last_step: int | None = None) -> None:
        self._folder, self._budget = folder, budget
        folder.mkdir(parents=True, exist_ok=True)
        self._rows: dict[int, list[_Kept]] = {}
        self._bytes = {False: 0, True: 0}
        """Bytes of the sample, and of the worst rows: counted along, because a run keeps ten thousand rows."""
        for left in folder.glob("*.new"):  # of a process that was killed while it wrote
            left.unlink()
        for path in sorted(folder.glob("*.jsonl")):
            step = int(path.stem)
            if last_step is not None and step > last_step:
                path.unlink()
                path.with_suffix(".rows").unlink(missing_ok=True)
            else:
                self._set(step, [_Kept(step, summary) for summary in read_summaries(path)])

    def write(self, step: int, rows: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> None:
        """(summary, columns) of each row that `choose` named; a step that is made again replaces its files."""
        left, kept = self._budget * STEP_SHARE, []
        for summary, columns in rows:
            body = bytes(pack({name: encode(name, value) for name, value in bounded(columns).items()}))
            left -= len(body)
            if left < 0:
                break
            kept.append((dict(summary), body))
        self._set(step, self._write_step(step, kept))
        if any(self._bytes[worst] > self._share(worst) for worst in self._bytes):
            self._shrink()

    def _share(self, worst: bool) -> float:
        """Bytes of the budget that belong to the worst rows, or to the sample."""
        return self._budget * (WORST_SHARE if worst else 1 - WORST_SHARE)

    def _set(self, step: int, rows: list[_Kept]) -> None:
        for one in self._rows.pop(step, []):
            self._bytes[one.is_worst] -= one.bytes
        for one in rows:
            self._bytes[one.is_worst] += one.bytes
        if rows:
            self._rows[step] = rows

    def _write_step(self, step: int, rows: Sequence[tuple[dict[str, Any], bytes]]) -> list[_Kept]:
        path, offset, kept = self._folder / f"{step:06d}.rows", 0, []
        for summary, body in rows:
            kept.append(
                _Kept(step, {**summary, "offset": offset, "length": len(body), "crc": zlib.crc32(body)})
            )
            offset += len(body)
        if not kept:
            path.with_suffix(".jsonl").unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            return []
        _replace(path, b"".join(body for _, body in rows))
        point("kept_rows.between_files")
        _replace(
            path.with_suffix(".jsonl"), b"".join(msgspec.json.encode(one.summary) + b"\n" for one in kept)
        )
        return kept

    def _shrink(self) -> None:
        """Drops rows until both shares are within the budget."""
        gone: set[int] = set()
        for worst, order in (
            (False, lambda one: place_of(one.step, one.summary["key"])),
            (True, lambda one: -float(one.summary.get("kl") or 0.0)),
        ):
            total, share = self._bytes[worst], self._share(worst)
            if total <= share:
                continue
            mine = [one for rows in self._rows.values() for one in rows if one.is_worst == worst]
            for one in sorted(mine, key=order, reverse=True):
                if total <= LEFT_AFTER_DROP * share:
                    break
                total -= one.bytes
                gone.add(id(one))
        for step, rows in sorted(self._rows.items()):
            left = [one for one in rows if id(one) not in gone]
            if len(left) < len(rows):
                self._set(step, self._write_step(step, self._readable(step, left)))

    def _readable(self, step: int, rows: Sequence[_Kept]) -> list[tuple[dict[str, Any], bytes]]:
        """A process that was killed between the two files of a step has left lines of other packs."""
        found = []
        for one in rows:
            with suppress(DataPlaneError):
                found.append((one.summary, read_pack(self._folder, step, one.summary)))
        return found


def _replace(path: Path, data: bytes) -> None:
    """Without fsync: a machine that loses power may lose rows of the sample, which readers leave out."""
    fresh = path.with_suffix(".new")
    fresh.write_bytes(data)
    os.replace(fresh, path)


@dataclass(slots=True)
class KeptRows:
    """The keeper of one launch, made at its first step, and the write under way."""

    keeper: RowKeeper | None = None
    writing: asyncio.Task[None] | None = None


def bounded(columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns with at most `MOST_CANDIDATES` candidates a token, and the mass outside all of them."""
    found = dict(columns)
    ids, logprobs = found.get("teacher_ids"), found.get("teacher_topk_logprobs")
    found.pop("teacher_hidden", None)  # kilobytes a token that show nothing without the head
    if ids is None or logprobs is None:
        return found
    found["tail"] = (1.0 - np.exp(logprobs.astype(np.float64)).sum(1)).clip(0.0, 1.0).astype(np.float32)
    if ids.shape[1] > MOST_CANDIDATES:
        best = np.argsort(-logprobs, axis=1, kind="stable")[:, :MOST_CANDIDATES]
        for name in ("teacher_ids", "teacher_topk_logprobs", "student_topk_logprobs"):
            if name in found:
                found[name] = np.ascontiguousarray(np.take_along_axis(found[name], best, 1))
    return found


def read_summaries(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError):
        return []


def read_pack(folder: Path, step: int, summary: Mapping[str, Any]) -> bytes:
    path = folder / f"{step:06d}.rows"
    try:
        with path.open("rb") as handle:
            handle.seek(int(summary["offset"]))
            body = handle.read(int(summary["length"]))
    except OSError as error:
        raise DataPlaneError(f"{path} cannot be read: {error.strerror}") from None
    if zlib.crc32(body) != summary["crc"]:
        raise DataPlaneError(
            f"{path}: row {summary.get('key')} was rewritten or damaged; read its line again"
        )
    return body


def read_columns(folder: Path, step: int, summary: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of one kept row."""
    frames = unpack(read_pack(folder, step, summary))
    return {name: decode(frame) for name, frame in frames.items() if isinstance(frame, bytes)}
