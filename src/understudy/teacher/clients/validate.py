"""Validates every reply of a teacher before its scores can reach the loss.

A missing or invalid number is an error that names teacher, replica, row and position. It is never replaced by
0.0, which would mean probability 1. Each check runs on the whole reply at once; its position is looked up
only on failure.

Legend: N sequences, P positions of all of them, C candidates (positions × K), K candidates of one position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from understudy.errors import TeacherReplyError
from understudy.teacher.clients.http import RequestRefused
from understudy.teacher.protocol import ScoreReply, ScoreRequest
from understudy.teacher.scoring.probe import CANARY_KEY
from understudy.types.scores import ScoreItem, Signal, TeacherScores
from understudy.types.usable_ids import UsableIds

ABOVE_ZERO = 1e-4
"""A logprob may exceed 0 by this much, by rounding."""
ABOVE_ONE = 1e-3
"""The probability mass of K candidates may exceed 1 by this much, by rounding."""
UNSORTED = 1e-6
IMPOSSIBLE = "a candidate's logprob is not a finite number ≤ 0"
DISAGREE = 1e-3
"""The scored token's logprob and the same token's among the candidates may differ by this much, by
rounding."""


Wrong = Callable[..., TeacherReplyError]


@dataclass(frozen=True, slots=True)
class Sender:
    """The sender of a reply."""

    teacher: str
    replica: str
    vocab: int
    """Ids are below this; 0 if the backend does not report it."""


def check_reply(request: ScoreRequest, reply: ScoreReply, sender: Sender) -> None:
    """Raise `TeacherReplyError` unless the reply is a valid answer to the request."""

    def wrong(what: str, row: int | None = None, position: int | None = None) -> TeacherReplyError:
        place = "" if row is None else f", row {request.keys[row]!r}"
        place += "" if position is None else f", position {position}"
        return TeacherReplyError(f"teacher {sender.teacher}, replica {sender.replica}{place}: {what}")

    _check_shape(request, reply, wrong)
    _check_echo(request, reply, wrong)
    rows_P = np.repeat(np.arange(len(request)), request.position_counts_N)

    def first(bad_P: np.ndarray) -> tuple[int, int, int]:
        """(index, row, position) of the first bad entry."""
        at = int(bad_P.argmax())
        return at, int(rows_P[at]), int(request.positions_P[at])

    _check_sampled(reply, first, wrong)
    if any(request.k_N):
        _check_candidates(request, reply, sender, rows_P, wrong)
    if len(reply.hidden):
        _check_hidden(request, reply, rows_P, wrong)


def _check_shape(request: ScoreRequest, reply: ScoreReply, wrong: Wrong) -> None:
    if reply.keys != request.keys:
        raise wrong(
            f"answers {len(reply.keys)} rows ({reply.keys[:2]} …) where {len(request)} were asked ({request.keys[:2]} …)"
        )
    for row, (asked, given) in enumerate(zip(request.signals, reply.signals, strict=True)):
        if asked is not given or request.k_N[row] != reply.k_N[row]:
            raise wrong(
                f"signal {given.value} with k = {reply.k_N[row]}; asked for {asked.value} with k = {request.k_N[row]}",
                row,
            )
    different = reply.position_counts_N != request.position_counts_N
    if different.any():
        row = int(different.argmax())
        raise wrong(
            f"{reply.position_counts_N[row]} positions; {request.position_counts_N[row]} were asked for", row
        )
    asked_hidden = any(signal is Signal.HIDDEN for signal in request.signals)
    if asked_hidden and not reply.hidden_size:
        raise wrong("hidden states of size 0")


def _check_echo(request: ScoreRequest, reply: ScoreReply, wrong: Wrong) -> None:
    different_N = reply.digests_N != request.digests_N
    if different_N.any():
        raise wrong("the reply echoes other tokens than were sent", int(different_N.argmax()))
    expected_P = request.tokens_T[request.flat_positions_P]
    different_P = reply.scored_P != expected_P
    if different_P.any():
        at = int(different_P.argmax())
        row = int(np.repeat(np.arange(len(request)), request.position_counts_N)[at])
        raise wrong(
            f"scores token {reply.scored_P[at]} where {expected_P[at]} was sent: the reply is shifted",
            row,
            int(request.positions_P[at]),
        )


def _check_sampled(
    reply: ScoreReply, first: Callable[[np.ndarray], tuple[int, int, int]], wrong: Wrong
) -> None:
    possible_P = np.isfinite(reply.sampled_P) & (reply.sampled_P <= ABOVE_ZERO)
    if not possible_P.all():
        at, row, position = first(~possible_P)
        raise wrong(
            f"logprob {reply.sampled_P[at]} of the scored token is not a finite number ≤ 0", row, position
        )


def _check_candidates(
    request: ScoreRequest, reply: ScoreReply, sender: Sender, rows_P: np.ndarray, wrong: Wrong
) -> None:
    """Candidates are checked as [positions, K] blocks, one per distinct K; usually there is one."""
    k_P = np.array(request.k_N)[rows_P]
    starts_P = np.cumsum(k_P) - k_P
    topk_P = np.array([signal is Signal.TOPK for signal in request.signals])[rows_P]
    named_starts_P = np.cumsum(np.where(topk_P, 0, k_P)) - np.where(topk_P, 0, k_P)
    for k in sorted(set(request.k_N) - {0}):
        for is_topk in (True, False):
            chosen = np.flatnonzero((k_P == k) & (topk_P == is_topk))
            if not len(chosen):
                continue
            block = _Block(
                ids_PK=_rows(reply.ids, starts_P[chosen], k),
                logprobs_PK=_rows(reply.logprobs, starts_P[chosen], k),
                scored_P=reply.scored_P[chosen],
                sampled_P=reply.sampled_P[chosen],
            )
            named_PK = None if is_topk else _rows(request.ids, named_starts_P[chosen], k)
            for what, bad_P in block.problems(named_PK, sender.vocab):
                if bad_P.any():
                    at = int(bad_P.argmax())
                    place = int(chosen[at])
                    shown = f"ids {block.ids_PK[at, :4].tolist()} …, logprobs {block.logprobs_PK[at, :4].tolist()} …"
                    raise wrong(f"{what} ({shown})", int(rows_P[place]), int(request.positions_P[place]))


def _rows(flat: np.ndarray, starts: np.ndarray, k: int) -> np.ndarray:
    """[positions, K]; a view when the block is the whole array."""
    if len(starts) * k == len(flat):
        return flat.reshape(len(starts), k)
    return flat[starts[:, None] + np.arange(k)]


@dataclass(frozen=True, slots=True)
class _Block:
    """The candidates of the positions that have the same K."""

    ids_PK: np.ndarray
    logprobs_PK: np.ndarray
    scored_P: np.ndarray
    sampled_P: np.ndarray

    def problems(self, named_PK: np.ndarray | None, vocab: int) -> Iterator[tuple[str, np.ndarray]]:
        """Yields (problem, bool [positions] that have it) per check; `named_PK` are the requested ids of
        `at_ids`.

        Comparisons are written so that NaN fails them, and ordered so that later ones may rely on earlier
        ones.
        """
        if named_PK is not None:
            possible_PK = np.isfinite(self.logprobs_PK) & (self.logprobs_PK <= ABOVE_ZERO)
            yield IMPOSSIBLE, ~possible_PK.all(1)
            other_P: np.ndarray = np.any(self.ids_PK != named_PK, axis=1)
            yield "other ids than were asked for", other_P
            yield self._twin_problem()
            return
        first_P, last_P = self.logprobs_PK[:, 0], self.logprobs_PK[:, -1]
        falling_PK: np.ndarray = self.logprobs_PK[:, 1:] <= self.logprobs_PK[:, :-1] + UNSORTED
        if not falling_PK.all():  # NaN, or out of order: find out which
            broken_P: np.ndarray = np.isnan(self.logprobs_PK).any(1)
            yield IMPOSSIBLE, broken_P
            unsorted_P: np.ndarray = np.logical_not(falling_PK.all(1))
            yield "candidates are not sorted, best first", unsorted_P
        # They fall from first to last, so these two bound all of them.
        yield IMPOSSIBLE, ~((first_P <= ABOVE_ZERO) & (last_P > -np.inf))
        mass_P = np.exp(self.logprobs_PK, dtype=np.float32).sum(1)
        yield "candidates hold more than all probability", mass_P > 1 + ABOVE_ONE
        ordered_PK = np.sort(self.ids_PK, axis=1)
        yield "a candidate id is negative", ordered_PK[:, 0] < 0
        if vocab:
            yield f"a candidate id is outside the vocabulary of {vocab}", ordered_PK[:, -1] >= vocab
        twice_P: np.ndarray = np.any(ordered_PK[:, 1:] == ordered_PK[:, :-1], axis=1)
        yield "a candidate appears twice", twice_P
        yield self._twin_problem()
        absent_P: np.ndarray = ~(self.ids_PK == self.scored_P[:, None]).any(1)
        hidden_P = np.logical_and(absent_P, self.sampled_P > last_P + DISAGREE)
        yield "the scored token is likelier than the last candidate yet not among them", hidden_P

    def _twin_problem(self) -> tuple[str, np.ndarray]:
        """If the scored token is among the candidates, its two logprobs must be equal up to rounding."""
        place_P, column_P = np.nonzero(self.ids_PK == self.scored_P[:, None])
        apart = np.abs(self.logprobs_PK[place_P, column_P] - self.sampled_P[place_P])
        wrong_P = np.zeros(len(self.scored_P), bool)
        wrong_P[place_P[~(apart <= DISAGREE)]] = True
        return "the scored token has two different logprobs: the reply is shifted or mixed up", wrong_P


def _check_hidden(request: ScoreRequest, reply: ScoreReply, rows_P: np.ndarray, wrong: Wrong) -> None:
    """bfloat16 is not finite when its eight exponent bits are all ones."""
    states = reply.hidden.reshape(-1, reply.hidden_size)
    broken = ((states & 0x7F80) == 0x7F80).any(1)
    if broken.any():
        is_hidden_P = np.array([signal is Signal.HIDDEN for signal in request.signals])[rows_P]
        place = int(np.flatnonzero(is_hidden_P)[int(broken.argmax())])
        raise wrong("a hidden state is not finite", int(rows_P[place]), int(request.positions_P[place]))


def check_usable(items: Sequence[ScoreItem], usable: UsableIds, who: str) -> None:
    """Raise `RequestRefused` naming the first row with an id that a model of the run has no token for."""
    for item in items:
        at = usable.first_unusable(item.tokens)
        if at is not None:
            raise RequestRefused(
                f"{who}, row {item.key!r}: token id {item.tokens[at]} at position {at} has no token for the student or for one of the "
                f"models beside it; usable ids are below {usable.limit}"
            )
        if item.signal is Signal.AT_IDS and item.ids is not None:
            at = usable.first_unusable(item.ids.reshape(-1))
            if at is not None:
                raise RequestRefused(
                    f"{who}, row {item.key!r}: id {item.ids.reshape(-1)[at]} named for 'at_ids' is not one that all models of the run have"
                )


def check_candidates_usable(scores: Sequence[TeacherScores], usable: UsableIds, who: str) -> None:
    """Raise `RequestRefused` naming the first row with an unusable candidate; for servers that cannot exclude
    ids. The candidates of the canary reach no loss."""
    for one in scores:
        if one.key == CANARY_KEY:
            continue
        ids = None if one.ids is None else one.ids.reshape(-1)
        at = None if ids is None else usable.first_unusable(ids)
        if ids is not None and at is not None:
            raise RequestRefused(
                f"{who}, row {one.key!r}: the teacher's candidate {ids[at]} is not an id that all models of the run have, and this server "
                "cannot leave it out"
            )
