"""Combines several teachers' scores of one row: the mixture p = Σ w_i · p_i of their distributions.

    sampled   log p(y) from each teacher's log p_i(y): exact
    at_ids    the same at every named id: exact
    topk      1. each teacher gives its K best ids
              2. each teacher scores the ids of the other teachers (cross scores)
              3. the K best of all these ids by p are kept
              Their probabilities are exact. An id that is in no teacher's K best cannot be among them
    hidden    refused: a mixture is not the softmax of one head over one state

For forward KL this is the weighted sum of the KLs to each teacher, up to a constant that has no gradient.

Legend: M teachers, P scored positions, K candidates of each teacher, C = M·K.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from understudy.errors import TeacherError
from understudy.types.references import ScoreRef, ScoresRef
from understudy.types.scores import ScoreItem, Signal, TeacherScores

Ask = Callable[[str, ScoreRef], Awaitable[ScoresRef]]
"""(teacher, item) → its scores."""


@dataclass(frozen=True, slots=True)
class PartialScores:
    """One teacher's partial scores and their weight; weights of a mixture sum to 1."""

    weight: float
    scores: TeacherScores


def needed_signals(signal: Signal) -> list[Signal]:
    """The signals each teacher of a mixture must support for a row that asks for `signal`."""
    if signal is Signal.HIDDEN:
        raise TeacherError(
            "rows with a mixture of teachers cannot be scored by 'hidden': a mixture is not the softmax of one head over "
            "one hidden state; set loss.signal to 'topk' or 'sampled'"
        )
    return [Signal.TOPK, Signal.AT_IDS] if signal is Signal.TOPK else [signal]


async def partial_scores_of(item: ScoreItem, shares: Mapping[str, float], ask: Ask) -> list[PartialScores]:
    """Every teacher's partial scores, heaviest teacher first; for `topk` all at the same C ids.

    Teachers are asked one after another.
    """
    needed_signals(item.signal)
    names = heaviest_first(shares)
    found = [await (await ask(name, item)).fetch() for name in names]
    if item.signal is Signal.TOPK and len(names) > 1:
        cross = []
        for own, name in enumerate(names):
            answer = await ask(name, at_others_ids(item, own, [_candidates(scores)[0] for scores in found]))
            cross.append(_candidates(await answer.fetch())[1])
        found = [at_all_ids(own, found, cross[own]) for own in range(len(names))]
    return [PartialScores(shares[name], scores) for name, scores in zip(names, found, strict=True)]


def heaviest_first(shares: Mapping[str, float]) -> list[str]:
    """The order in which the teachers of a mixture are asked."""
    return sorted(shares, key=lambda name: (-shares[name], name))


def at_others_ids(item: ScoreItem, own: int, ids_PK: Sequence[np.ndarray]) -> ScoreItem:
    """The request for one teacher's cross scores: its scores at the K best ids of the other teachers."""
    others_PC = np.concatenate([ids for i, ids in enumerate(ids_PK) if i != own], axis=1)
    return replace(item, signal=Signal.AT_IDS, k=0, ids=others_PC)


def at_all_ids(own: int, best: Sequence[TeacherScores], others_PC: np.ndarray) -> TeacherScores:
    """One teacher's scores at all C ids: its own K best, then its cross scores `others_PC`, in teacher
    order."""
    ids_PK = [_candidates(scores)[0] for scores in best]
    logprobs_PK = np.split(others_PC, len(best) - 1, axis=1)
    logprobs_PK.insert(own, _candidates(best[own])[1])
    return replace(
        best[own], ids=np.concatenate(ids_PK, axis=1), logprobs=np.concatenate(logprobs_PK, axis=1)
    )


def mix(partials: Sequence[PartialScores], item: ScoreItem) -> TeacherScores:
    """The final scores from the partial ones, in the shape that `item` asks for."""
    if len(partials) == 1:
        return partials[0].scores
    log_weights_M = np.log([partial_scores.weight for partial_scores in partials])
    sampled_P = _log_mean(
        [partial_scores.scores.sampled_logprobs for partial_scores in partials], log_weights_M
    )
    ids = logprobs = None
    if item.signal in (Signal.TOPK, Signal.AT_IDS):
        ids, _ = _candidates(partials[0].scores)
        logprobs = _log_mean(
            [_candidates(partial_scores.scores)[1] for partial_scores in partials], log_weights_M
        )
        if item.signal is Signal.TOPK:
            ids, logprobs = _best(ids, logprobs, item.k)
    return TeacherScores(
        key=item.key,
        teacher="+".join(sorted(partial_scores.scores.teacher for partial_scores in partials)),
        signal=item.signal,
        sampled_logprobs=sampled_P.astype(np.float32),
        ids=ids,
        logprobs=None if logprobs is None else logprobs.astype(np.float32),
        version=max(partial_scores.scores.version for partial_scores in partials),
    )


def _log_mean(logprobs_M: Sequence[np.ndarray], log_weights_M: np.ndarray) -> np.ndarray:
    """float64: log Σ w_i · p_i."""
    parts = [part.astype(np.float64) + weight for part, weight in zip(logprobs_M, log_weights_M, strict=True)]
    return np.logaddexp.reduce(parts, axis=0)


def _best(ids_PC: np.ndarray, logprobs_PC: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The K best distinct ids of each position, best first; ties go to the smaller id."""
    order_PC = np.lexsort((ids_PC, -logprobs_PC), axis=1)
    ids_PC = np.take_along_axis(ids_PC, order_PC, 1)
    logprobs_PC = np.take_along_axis(logprobs_PC, order_PC, 1)
    # An id that several teachers gave has the same value each time, up to rounding; the first is kept.
    repeated_PC = np.array([~_first_of_its_kind(ids_C) for ids_C in ids_PC], bool).reshape(ids_PC.shape)
    kept_PK = np.argsort(repeated_PC, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(ids_PC, kept_PK, 1), np.take_along_axis(logprobs_PC, kept_PK, 1)


def _first_of_its_kind(ids_C: np.ndarray) -> np.ndarray:
    first_C = np.zeros(len(ids_C), bool)
    first_C[np.unique(ids_C, return_index=True)[1]] = True
    return first_C


def _candidates(scores: TeacherScores) -> tuple[np.ndarray, np.ndarray]:
    assert scores.ids is not None and scores.logprobs is not None
    return scores.ids, scores.logprobs
