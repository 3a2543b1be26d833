"""A row's mixture of teachers, where its scores lie elsewhere: asked about here, weighed by a worker.

    each teacher's K best ──> opinions in the run directory ──where they lie──> each teacher at the others' ids ──> the same
    MixOrder: where all of them lie, and their weights ──> worker: `teacher/mixture.py` ──> the row's verdict, run directory and queue

The questions are those of `opinions_of`, in its order, and the arithmetic is its own, so the verdict is that of a local run to the
bit. Opinions are not put into the queue: they are read once, and the run directory outlives the worker that wrote them.
Where a teacher could only be asked from the trainer's process, the others' opinions are read by it and mixed there.
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
    """The verdict of several teachers on a row; a `FarScores`, unless it had to be made here."""
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
    """One teacher's second question: by where the others' candidates lie, or with them where some are here."""
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
