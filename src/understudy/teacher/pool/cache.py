"""Scores that were asked for before. A frozen teacher gives the same answer again, so asking twice is waste.

The key is (teacher identity, tokens, positions, signal, K, named ids); row keys are not part of it. Where requests
are scored alone ("by_request"), floating-point results follow the composition of a request, and only a whole request
seen before is answered from here: the cache never changes a single bit of a run.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from understudy.teacher.manifest import Batching, Manifest
from understudy.types.scores import ScoreItem, TeacherScores


class PoolCache(Protocol):
    """What a pool asks before it asks a replica."""

    hits: int

    def parts(self, manifest: Manifest, items: Sequence[ScoreItem]) -> list[tuple[bytes, list[int]]]: ...

    async def find(self, key: bytes, items: Sequence[ScoreItem]) -> list[TeacherScores] | None: ...

    def put(self, key: bytes, scores: Sequence[TeacherScores]) -> None: ...


@dataclass(slots=True)
class ScoreCache:
    """Least recently used entries leave when `max_bytes` is reached."""

    max_bytes: int
    held_bytes: int = 0
    hits: int = 0
    """Items answered from here."""
    _entries: OrderedDict[bytes, list[TeacherScores]] = field(default_factory=OrderedDict)

    def parts(self, manifest: Manifest, items: Sequence[ScoreItem]) -> list[tuple[bytes, list[int]]]:
        """(cache key, indexes of the items it covers): one for the whole request, or one per item."""
        own = [item_digest(manifest, item) for item in items]
        if manifest.batching is Batching.BY_REQUEST:
            return [(hashlib.sha256(b"".join(own)).digest(), list(range(len(items))))]
        return [(digest, [i]) for i, digest in enumerate(own)]

    def get(self, key: bytes, items: Sequence[ScoreItem]) -> list[TeacherScores] | None:
        found = self._entries.get(key)
        if found is None:
            return None
        self._entries.move_to_end(key)
        self.hits += len(items)
        return [replace(scores, key=item.key) for scores, item in zip(found, items, strict=True)]

    async def find(self, key: bytes, items: Sequence[ScoreItem]) -> list[TeacherScores] | None:
        return self.get(key, items)

    def put(self, key: bytes, scores: Sequence[TeacherScores]) -> None:
        if key in self._entries:
            return
        # Replies are views of one buffer; a copy keeps an entry from holding the rest of it alive.
        kept = [_copied(one) for one in scores]
        self._entries[key] = kept
        self.held_bytes += size_of(kept)
        while self.held_bytes > self.max_bytes and self._entries:
            _, gone = self._entries.popitem(last=False)
            self.held_bytes -= size_of(gone)


def item_digest(manifest: Manifest, item: ScoreItem) -> bytes:
    return question_digest(manifest, item, content_digest(item.tokens, item.positions, item.ids))


def question_digest(manifest: Manifest, item: ScoreItem, content: bytes) -> bytes:
    """What is asked of which teacher; `content` stands for the item's arrays, wherever they are."""
    return hashlib.sha256(repr((manifest.identity, item.signal.value, item.k)).encode() + content).digest()


def content_digest(*arrays: np.ndarray | None) -> bytes:
    total = hashlib.sha256()
    for array in arrays:
        if array is not None:
            total.update(repr(array.shape).encode())
            total.update(np.ascontiguousarray(array, dtype="<i4").data)
    return total.digest()


def _arrays(scores: TeacherScores) -> dict[str, np.ndarray]:
    named = {name: getattr(scores, name) for name in ("sampled_logprobs", "ids", "logprobs", "hidden")}
    return {name: array for name, array in named.items() if array is not None}


def _copied(scores: TeacherScores) -> TeacherScores:
    def own(array: np.ndarray | None) -> np.ndarray | None:
        if array is None:
            return None
        array = array.copy()
        array.flags.writeable = False
        return array

    sampled = own(scores.sampled_logprobs)
    assert sampled is not None
    return replace(
        scores,
        sampled_logprobs=sampled,
        ids=own(scores.ids),
        logprobs=own(scores.logprobs),
        hidden=own(scores.hidden),
    )


def size_of(entry: Sequence[TeacherScores]) -> int:
    """Bytes of memory that scores take."""
    return 256 + sum(array.nbytes for scores in entry for array in _arrays(scores).values())
