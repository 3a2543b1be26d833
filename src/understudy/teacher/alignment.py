"""Aligns two tokenizations of one completion by their bytes, and moves a teacher's scores to the student's tokens.

    student   | hel | lo |  wor | ld | <eos>       bounds: places where both have read the same bytes
    teacher   | hello    |  world    | <end>       chunks: what lies between two bounds
              └── chain ──┴── chain ──┴ one to one

| signal | at the student's tokens |
|---|---|
| log p of the written token | one to one: the teacher's. A chain with the log-probabilities lq of the student's tokens and L, the sum of the teacher's: lq − (Σ lq − L), so that each token has the whole chain's difference |
| the teacher's K best | at the first token of each chunk, each at the student's id that writes the same bytes, or else at the first of the student's tokens of these bytes; those of one id are one candidate with their sum. Elsewhere no candidates (`NO_CANDIDATE`) |

Imports no torch. Legend: P student tokens of a completion, M teacher tokens, C chunks, K candidates.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from understudy.errors import DataError
from understudy.teacher.token_bytes import TokenBytes
from understudy.types.scores import NO_CANDIDATE, ScoreItem, TeacherScores
from understudy.types.usable_ids import UsableIds


@dataclass(frozen=True, slots=True)
class Alignment:
    """One completion in the tokens of both models."""

    tokens: np.ndarray
    """int32 [M]: the teacher's tokens, up to the last bound."""
    bounds: np.ndarray
    """int64 [C + 1, 2]: tokens of the student, tokens of the teacher that end at each bound; the first is (0, 0)."""
    length: int
    """P. The student's tokens after the last bound are left out."""

    @property
    def counts(self) -> tuple[int, int, int]:
        """The student's tokens that are aligned one to one, in chains, and left out."""
        students, teachers = np.diff(self.bounds, axis=0).T
        one = int(np.count_nonzero((students == 1) & (teachers == 1)))
        aligned = int(self.bounds[-1, 0])
        return one, aligned - one, self.length - aligned


@dataclass(frozen=True, slots=True)
class TurnEnds:
    """The ids that end a turn."""

    student: Collection[int]
    """All ids at which the student's rollouts end."""
    student_own: int
    """The one that the teacher's end becomes among its candidates."""
    teacher: int
    """The one that stands for any of the student's."""


class TokenAligner:
    """Translates between the tokens of a student and of one teacher. Used by produce on the event loop."""

    def __init__(
        self, student: TokenBytes, teacher: TokenBytes, ends: TurnEnds, usable: UsableIds | None = None
    ) -> None:
        """`usable`: the student's ids that this run may use."""
        self._student, self._teacher, self._ends = student, teacher, ends
        self._teacher_special = {name: number for number, name in teacher.special.items()}
        self._ids = max((*student.pieces, *student.special)) + 1 if usable is None else usable.limit
        same = _same_bytes(student, teacher, usable)
        same[same == ends.student_own] = -1
        same[ends.teacher] = ends.student_own
        self.shared = int(np.count_nonzero(same >= 0))
        """The teacher's tokens that the student has too, the end of a turn included."""
        never = {ends.student_own, *(() if usable is None else usable.holes)}
        self._to_student = _with_first_tokens(same, student, teacher, never, self._ids)

    def align(self, completion: np.ndarray, row: str = "") -> Alignment:
        """Raises `DataError` if the completion holds a special token that the teacher lacks, or if nothing of it
        can be aligned."""
        ids = completion.tolist()
        is_text = [number in self._student.pieces for number in ids]
        if ids and ids[-1] in self._ends.student:
            is_text[-1] = False
        tokens: list[int] = []
        bounds = [(0, 0)]
        start, whole = 0, True
        while start < len(ids) and whole:
            if is_text[start]:
                stop = is_text.index(False, start) if False in is_text[start:] else len(ids)
                found, shared, whole = self._text(ids[start:stop])
                bounds += [(start + ours, len(tokens) + theirs) for ours, theirs in shared]
                tokens += found
                start = stop
            else:
                tokens.append(self._special(ids[start], start == len(ids) - 1, row))
                start += 1
                bounds.append((start, len(tokens)))
        if not tokens:
            raise DataError(f"row {row}: no token of it ends where one of its teacher's tokens ends")
        return Alignment(np.array(tokens, np.int32), np.array(bounds, np.int64), len(ids))

    def _text(self, ids: list[int]) -> tuple[list[int], list[tuple[int, int]], bool]:
        """(the teacher's tokens, bounds after the first, whether all is aligned) of tokens that write text. If
        they end within a character, or the teacher cannot write all of it, what comes after is left out."""
        pieces = self._student.bytes_of(ids)
        data = b"".join(pieces)
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            text = data[: error.start].decode()
        tokens = self._teacher.encode(text)
        theirs = [0]
        for piece in self._teacher.bytes_of(tokens):
            end = theirs[-1] + len(piece)
            if not piece or data[theirs[-1] : end] != piece:
                break
            theirs.append(end)
        ours = np.cumsum([0, *(len(piece) for piece in pieces)])
        _, at_ours, at_theirs = np.intersect1d(ours, theirs, return_indices=True)
        shared = list(zip(at_ours.tolist(), at_theirs.tolist(), strict=True))
        return tokens[: shared[-1][1]], shared[1:], shared[-1][0] == len(ids)

    def _special(self, number: int, last: bool, row: str) -> int:
        if last and number in self._ends.student:
            return self._ends.teacher
        name = self._student.special.get(number)
        if name in self._teacher_special:
            return self._teacher_special[name]
        raise DataError(
            f"row {row} holds the special token {name or number!r}, which its teacher lacks, so the row cannot be aligned"
        )

    def request(self, item: ScoreItem, prompt: np.ndarray, alignment: Alignment) -> ScoreItem:
        """The request as the teacher reads it: its own prompt, and its tokens of the completion."""
        tokens = np.concatenate([prompt, alignment.tokens]).astype(np.int32)
        positions = np.arange(len(prompt), len(tokens), dtype=np.int32)
        return replace(item, tokens=tokens, positions=positions)

    def scores(self, reply: TeacherScores, alignment: Alignment, behaviour: np.ndarray) -> TeacherScores:
        """The reply at the student's tokens. `behaviour`: float32 [P], NaN where the student drew nothing."""
        ids = logprobs = None
        if reply.ids is not None and reply.logprobs is not None:
            ids, logprobs = self._candidates(reply.ids, reply.logprobs, alignment)
        return replace(
            reply,
            sampled_logprobs=sampled_of(reply.sampled_logprobs, alignment, behaviour),
            ids=ids,
            logprobs=logprobs,
            aligned=alignment.counts,
        )

    def _candidates(
        self, ids_MK: np.ndarray, logprobs_MK: np.ndarray, alignment: Alignment
    ) -> tuple[np.ndarray, np.ndarray]:
        at_C, from_C = alignment.bounds[:-1].T
        theirs_CK = ids_MK[from_C]
        known = len(self._to_student)
        ours_CK = np.where(theirs_CK < known, self._to_student[np.minimum(theirs_CK, known - 1)], -1)
        ours_CK, logprobs_CK = _merged(ours_CK, logprobs_MK[from_C])
        best_CK = np.where(ours_CK < 0, np.inf, -logprobs_CK)
        order_CK = np.argsort(best_CK, axis=1, kind="stable")  # those without a counterpart last
        ours_CK = np.take_along_axis(ours_CK, order_CK, 1)
        logprobs_CK = np.take_along_axis(logprobs_CK, order_CK, 1)
        shape = (alignment.length, ids_MK.shape[1])
        ids_PK, logprobs_PK = np.full(shape, -1, np.int32), np.full(shape, NO_CANDIDATE, np.float32)
        ids_PK[at_C] = ours_CK
        logprobs_PK[at_C] = np.where(ours_CK < 0, np.float32(NO_CANDIDATE), logprobs_CK)
        return _filled(ids_PK, self._ids), logprobs_PK


def sampled_of(logprobs_M: np.ndarray, alignment: Alignment, behaviour_P: np.ndarray) -> np.ndarray:
    """float32 [P]: log p of each token, so that log q − log p is the difference of the whole chunk. It is 0 for a
    token that is left out. Where nothing was drawn, a chain's log-probability is shared out evenly."""
    found_P = np.nan_to_num(behaviour_P.astype(np.float64), nan=0.0)
    starts_C, counts_C = alignment.bounds[:-1], np.diff(alignment.bounds[:, 0])
    aligned = int(alignment.bounds[-1, 0])
    total_C = np.add.reduceat(logprobs_M.astype(np.float64), starts_C[:, 1])
    if np.isnan(behaviour_P).any():
        found_P[:aligned] = np.repeat(total_C / counts_C, counts_C)
    else:
        drawn_C = np.add.reduceat(found_P[:aligned], starts_C[:, 0])
        chain_P = found_P[:aligned] - np.repeat(drawn_C - total_C, counts_C)
        found_P[:aligned] = np.where(
            np.repeat(counts_C, counts_C) == 1, np.repeat(total_C, counts_C), chain_P
        )
    return found_P.astype(np.float32)


def _same_bytes(student: TokenBytes, teacher: TokenBytes, usable: UsableIds | None) -> np.ndarray:
    """int32 by id of the teacher: the student's token that writes the same bytes, −1 if there is none. Each of the
    student's tokens stands for one of the teacher's."""
    ours = student.by_bytes()
    holes = set(() if usable is None else usable.holes)
    found = np.full(max((*teacher.pieces, *teacher.special)) + 1, -1, np.int32)
    for piece, number in teacher.by_bytes().items():
        own = ours.get(piece)
        if own is not None and own not in holes and (usable is None or own < usable.limit):
            found[number] = own
    return found


def _with_first_tokens(
    same: np.ndarray, student: TokenBytes, teacher: TokenBytes, never: Collection[int], limit: int
) -> np.ndarray:
    """The same, and for a text that the student has no token for, the first of its tokens of that text: how the
    student begins to write it. `never`, and ids from `limit` on, are left out."""
    found = same.copy()
    for number, piece in teacher.pieces.items():
        if same[number] >= 0:
            continue
        try:
            first = student.encode(piece.decode())[:1]
        except UnicodeDecodeError:  # a part of a character
            continue
        for own in first:
            begin = student.pieces.get(own)
            if begin and piece.startswith(begin) and own not in never and own < limit:
                found[number] = own
    return found


def _merged(ids_CK: np.ndarray, logprobs_CK: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Candidates of a position with one id become the first of them, with the sum of their probabilities; the others
    get −1."""
    rows, k = ids_CK.shape
    known = ids_CK.ravel() >= 0
    keys = np.where(known, ids_CK.ravel() + np.repeat(np.arange(rows), k) * (int(ids_CK.max()) + 1), -1)
    _, first, of, counts = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
    with np.errstate(divide="ignore"):
        sums = np.log(np.bincount(of, np.exp(logprobs_CK.ravel().astype(np.float64))))
    several = known & (counts[of] > 1)
    ids = np.where(several & (first[of] != np.arange(rows * k)), -1, ids_CK.ravel())
    logprobs = np.where(several, np.minimum(sums[of], 0.0), logprobs_CK.ravel())
    return ids.reshape(rows, k), logprobs.astype(np.float32).reshape(rows, k)


def _filled(ids_PK: np.ndarray, count: int) -> np.ndarray:
    """The ids with each −1 replaced by an id below `count` that the position has not got: ids of a position are
    distinct."""
    k = ids_PK.shape[1]
    taken_PL = np.zeros((len(ids_PK), min(2 * k, count)), bool)
    place_P, column = np.nonzero((ids_PK >= 0) & (ids_PK < taken_PL.shape[1]))
    taken_PL[place_P, ids_PK[place_P, column]] = True
    free_PK = np.argsort(taken_PL, axis=1, kind="stable")[:, :k].astype(np.int32)
    gap_PK = ids_PK < 0
    rank_PK = np.maximum(np.cumsum(gap_PK, axis=1) - 1, 0)
    return np.where(gap_PK, np.take_along_axis(free_PK, rank_PK, 1), ids_PK)
