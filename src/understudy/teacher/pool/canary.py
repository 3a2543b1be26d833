"""The canary: fixed tokens sent with every request, whose scores must equal those at admission.

Some wrong replies look valid: scores shifted by one position under a correct echo, weights that changed in a
running process, a stale buffer. No check of the reply alone always detects them. Twelve tokens with known
scores do. Those of a teacher that reads pictures stand around a picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from understudy.errors import TeacherReplyError
from understudy.teacher.pool.integrity import Identity, probe_picture_of
from understudy.teacher.scoring.probe import CANARY_KEY, probe_items
from understudy.types.references import ScoreRef, ScoresRef
from understudy.types.scores import Signal

APART = {"float32": 1e-3}
"""Nats. Scores vary slightly with the composition of a batch, more so in half precision."""
APART_HALF = 0.25


class Canary:
    """The fixed tokens and their expected scores; a pool adds them to a request and checks them in the
    reply."""

    def __init__(self, identity: Identity) -> None:
        manifest = identity.manifest
        self._item = replace(
            probe_items(
                manifest.vocab_size,
                manifest.limits.max_length,
                manifest.unused_ids,
                probe_picture_of(manifest),
            )[0],
            key=CANARY_KEY,
        )
        self._named = 0 if 0 not in manifest.unused_ids else int(self._item.tokens[0])
        """The id scored for the fixed tokens if the request is for named ids."""
        self._expected_P = identity.probe_logprobs
        self._allowed = APART.get(manifest.dtype, APART_HALF)
        self._most_tokens = manifest.limits.max_request_tokens

    def with_items(self, items: Sequence[ScoreRef]) -> list[ScoreRef]:
        """The items and the fixed tokens, with the signal and K of the last item so that they share its
        batch."""
        if sum(item.length for item in items) + len(self._item.tokens) > self._most_tokens:
            return list(items)
        last = items[-1]
        positions = self._item.positions
        own = replace(self._item, signal=last.signal, k=last.k)
        if last.signal is Signal.AT_IDS and last.ids_each:
            own = replace(own, ids=np.full((len(positions), last.ids_each), self._named, np.int32))
        return [*items, own]

    async def checked(self, scores: Sequence[ScoresRef], teacher: str, replica: str) -> list[ScoresRef]:
        """The scores without the canary's; raises if the canary's are not those of admission."""
        if not scores or scores[-1].key != CANARY_KEY:
            return list(scores)
        apart_P = np.abs((await scores[-1].fetch()).sampled_logprobs - self._expected_P)
        wrong_P = ~(apart_P <= self._allowed)
        if wrong_P.any():
            at = int(wrong_P.argmax())
            raise TeacherReplyError(
                f"teacher {teacher}, replica {replica}, row {scores[0].key!r} …: the fixed tokens sent along came back with "
                f"other scores than at admission (position {self._item.positions[at]}: {apart_P[at]:.3g} nats apart): "
                "the reply is shifted, or the replica's weights changed"
            )
        return list(scores[:-1])
