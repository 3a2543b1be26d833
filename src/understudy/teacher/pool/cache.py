"""Cache of scores: a frozen teacher gives the same scores for the same request.

The key is (teacher identity, tokens, hashes of pictures, positions, signal, K, named ids); row keys are not
part of it. If the teacher scores requests alone ("by_request"), floating-point results depend on the
composition of a request. Then only whole requests are cached, so the cache never changes a bit of a run.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from understudy.teacher.manifest import Manifest, RequestBatching
from understudy.types.scores import ScoreItem, TeacherScores


@dataclass(slots=True)
class ScoreCache:
    """An LRU cache of at most `max_bytes`; used by one pool on its event loop."""

    max_bytes: int
    held_bytes: int = 0
    hits: int = 0
    """Items answered from here."""
    _entries: OrderedDict[bytes, list[TeacherScores]] = field(default_factory=OrderedDict)

    def parts(self, manifest: Manifest, items: Sequence[ScoreItem]) -> list[tuple[bytes, list[int]]]:
        """(cache key, indexes of the items it covers): one for the whole request, or one per item."""
        own = [item_digest(manifest, item) for item in items]
        if manifest.batching is RequestBatching.BY_REQUEST:
            return [(hashlib.sha256(b"".join(own)).digest(), list(range(len(items))))]
        return [(digest, [i]) for i, digest in enumerate(own)]

    def get(self, key: bytes, items: Sequence[ScoreItem]) -> list[TeacherScores] | None:
        found = self._entries.get(key)
        if found is None:
            return None
        self._entries.move_to_end(key)
        self.hits += len(items)
        return [replace(scores, key=item.key) for scores, item in zip(found, items, strict=True)]

    def put(self, key: bytes, scores: Sequence[TeacherScores]) -> None:
        if key in self._entries:
            return
        # Replies are views of one buffer; without a copy an entry would keep the whole buffer alive.
        kept = [_copied(one) for one in scores]
        self._entries[key] = kept
        self.held_bytes += _size(kept)
        while self.held_bytes > self.max_bytes and self._entries:
            _, gone = self._entries.popitem(last=False)
            self.held_bytes -= _size(gone)


def item_digest(manifest: Manifest, item: ScoreItem) -> bytes:
    total = hashlib.sha256(repr((manifest.identity, item.signal.value, item.k, item.media)).encode())
    for array in (item.tokens, item.positions, item.ids):
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


def _size(entry: Sequence[TeacherScores]) -> int:
    return 256 + sum(array.nbytes for scores in entry for array in _arrays(scores).values())
