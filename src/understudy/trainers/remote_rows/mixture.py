"""Mixtures of teachers for remote rows: the trainer orders the requests, a worker mixes the scores.

    1. every teacher: its top K                        ──> partial scores (run directory)
    2. every teacher: at the other teachers' top K     ──> cross scores (run directory), signal TOPK only
    3. MixOrder: locations and weights ──> a worker    ──> final scores (run directory and queue)

Requests come in the same order as in `opinions_of`, with the same arithmetic, so the final scores are
bit-identical to those of a local run. Partial scores do not go into the queue: they are read once, and the
run directory outlives the worker that wrote them. If one teacher had to be asked from the trainer's process,
that process reads the other teachers' partial scores and mixes them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from understudy.teacher.mixture import (
    Ask,
    Opinion,
    at_all_ids,
    at_others_ids,
    heaviest_first,
    mix,
    needed_signals,
)
from understudy.trainers.remote_rows import messages as wire
from understudy.trainers.remote_rows.scoring import FarScoreItem, FarScores, FarScoring
from understudy.types.scores import ScoreItem, Signal, TeacherScores


async def score_far_mixture(
    scoring: FarScoring, item: FarScoreItem, shares: Mapping[str, float], ask: Ask
) -> TeacherScores:
    """A row's final scores, mixed from several teachers. A `FarScores`, unless the trainer's process had to
    mix them."""
    needed_signals(item.signal)
    names = heaviest_first(shares)
    if len(names) == 1:
        return await ask(names[0], item)
    best = [await ask(name, replace(item, use=wire.Use.OPINION)) for name in names]
    rest: list[TeacherScores] = []
    if item.signal is Signal.TOPK:
        for own, name in enumerate(names):
            rest.append(await ask(name, await _about_the_others(scoring, item, own, best)))
    far_best, far_rest = _far(best), _far(rest)
    if len(far_best) == len(best) and len(far_rest) == len(rest):
        opinions = [
            wire.OpinionAt(one.teacher, shares[name], one.written, far_rest[i].written if far_rest else None)
            for i, (name, one) in enumerate(zip(names, far_best, strict=True))
        ]
        verdict = await scoring.mix(item, opinions)
        if verdict is not None:
            return verdict
    return await _mixed_here(scoring, item, [shares[name] for name in names], best, rest)


async def _about_the_others(
    scoring: FarScoring, item: FarScoreItem, own: int, best: Sequence[TeacherScores]
) -> ScoreItem:
    """The request for one teacher's cross scores.

    It names the location of the other teachers' candidates, or carries their ids if some scores are in this
    process."""
    others = [one for i, one in enumerate(best) if i != own]
    far = _far(others)
    if len(_far(best)) < len(best):
        (row,) = await scoring.near([item])
        ids_PK = [(await scoring.brought(one)).ids for one in best]
        return at_others_ids(row, own, [ids for ids in ids_PK if ids is not None])
    known = item.digest and all(one.ids_digest for one in far)
    digest = hashlib.sha256(item.digest + b"".join(one.ids_digest for one in far)).digest() if known else b""
    blank_PC = np.broadcast_to(np.int32(0), (len(item.positions), len(others) * item.k))
    return replace(
        item,
        signal=Signal.AT_IDS,
        k=0,
        ids=blank_PC,
        digest=digest,
        use=wire.Use.REST,
        others=tuple(far),
    )


async def _mixed_here(
    scoring: FarScoring,
    item: FarScoreItem,
    weights: Sequence[float],
    best: Sequence[TeacherScores],
    rest: Sequence[TeacherScores],
) -> TeacherScores:
    scoring.rows_judged_here += 1
    found = [await scoring.brought(one) for one in best]
    told = [await scoring.brought(one) for one in rest]
    whole = [at_all_ids(own, found, _logprobs(one)) for own, one in enumerate(told)] or found
    return mix([Opinion(weight, one) for weight, one in zip(weights, whole, strict=True)], item)


def _far(scores: Sequence[TeacherScores]) -> list[FarScores]:
    return [one for one in scores if isinstance(one, FarScores)]


def _logprobs(scores: TeacherScores) -> np.ndarray:
    assert scores.logprobs is not None
    return scores.logprobs
