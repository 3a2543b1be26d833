"""Scores that workers remember, by name: a row with the tokens of an earlier one is answered without asking the teacher again.

    pool: seen before? ──digest of the row──> here: who remembers it ──RecallOrder──> that worker ──scores──> run directory, queue

The digest of what a teacher is told of a row comes with its announcement, so the trainer's process looks it up without having the
tokens, and what it keeps of an answer is a name. Scores are remembered from every answer; they are named here only after the
pool has checked the fixed tokens that rode along, so a wrong answer is never recalled. A worker that died, or let go of what
it remembered, costs a request. See docs/decisions/0014-remembered-scores.md.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

from understudy.teacher.manifest import Batching, Manifest
from understudy.teacher.pool.cache import ScoreCache, question_digest
from understudy.trainers.remote_rows.scoring import FarScoreItem, FarScores, FarScoring, Memory
from understudy.types.scores import ScoreItem, TeacherScores

_NO_KEY = b""
"""Of a question whose rows' contents are not known here: it is asked, and not remembered."""


class FarScoreCache:
    """A `PoolCache`. Names that were not used for longest leave when the scores they stand for reach `max_bytes`."""

    def __init__(self, scoring: FarScoring, teacher: str, max_bytes: int) -> None:
        self.hits = 0
        self._scoring = scoring
        self._teacher = teacher
        self._max_bytes = max_bytes
        self._held_bytes = 0
        self._memories: OrderedDict[bytes, list[Memory]] = OrderedDict()
        self._here = ScoreCache(max_bytes)
        """Of requests that no worker could carry out."""

    def parts(self, manifest: Manifest, items: Sequence[ScoreItem]) -> list[tuple[bytes, list[int]]]:
        own = [
            question_digest(manifest, item, item.digest)
            if isinstance(item, FarScoreItem) and item.digest
            else _NO_KEY
            for item in items
        ]
        if manifest.batching is Batching.BY_REQUEST:
            whole = hashlib.sha256(b"".join(own)).digest() if all(own) else _NO_KEY
            return [(whole, list(range(len(items))))]
        return [(digest, [i]) for i, digest in enumerate(own)]

    async def find(self, key: bytes, items: Sequence[ScoreItem]) -> list[TeacherScores] | None:
        memories = self._memories.get(key)
        if memories is None:
            found = self._here.get(key, items)
        else:
            self._memories.move_to_end(key)
            rows = [item for item in items if isinstance(item, FarScoreItem)]
            found = await self._scoring.recall(self._teacher, memories, rows)
            if found is None and self._memories.get(key) is memories:
                self._forget(key)
        self.hits += len(found or ())
        return found

    def put(self, key: bytes, scores: Sequence[TeacherScores]) -> None:
        if key == _NO_KEY or key in self._memories:
            return
        memories = [one.memory for one in scores if isinstance(one, FarScores) and one.memory is not None]
        if not any(isinstance(one, FarScores) for one in scores):
            self._here.put(key, scores)
        elif len(memories) == len(scores):
            self._memories[key] = memories
            self._held_bytes += _size(memories)
            while self._held_bytes > self._max_bytes and self._memories:
                self._forget(next(iter(self._memories)))

    def _forget(self, key: bytes) -> None:
        self._held_bytes -= _size(self._memories.pop(key))


def _size(memories: Sequence[Memory]) -> int:
    return sum(memory.size for memory in memories)
