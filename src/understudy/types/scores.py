"""A scoring request to a teacher (`ScoreItem`) and its reply (`TeacherScores`).

Both are aligned to `positions`: entry p scores token `tokens[positions[p]]`, predicted from the tokens
before it. Their arrays are in this process; `references.py` has the references to those that may not be.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

NO_CANDIDATE = -1e30
"""The log-probability that marks an entry of K candidates as empty, for a teacher of another tokenizer. Its id is
any id that the position has not got, and no part of the comparison: the student's mass there belongs to the tail."""


class Signal(StrEnum):
    SAMPLED = "sampled"
    """log p_T(y_t) of the token the student wrote."""
    TOPK = "topk"
    """ids and full-softmax logprobs of the teacher's K best, plus log p_T(y_t)."""
    AT_IDS = "at_ids"
    """full-softmax logprobs at ids the caller names per position, plus log p_T(y_t)."""
    HIDDEN = "hidden"
    """the final hidden state before the head, plus log p_T(y_t); the head itself is sent once per teacher."""


@dataclass(frozen=True, slots=True)
class ScoreItem:
    """One sequence to be scored."""

    key: str
    tokens: np.ndarray
    """int32 [T]."""
    positions: np.ndarray
    """int32 [P], ascending, each in 1 … T−1: the tokens to score."""
    signal: Signal
    k: int = 0
    """How many candidates (`topk` only)."""
    ids: np.ndarray | None = None
    """int32 [P, K] (`at_ids` only)."""
    media: tuple[str, ...] = ()
    """Hashes of its pictures, in the order of their placeholders."""

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def ids_each(self) -> int:
        return 0 if self.ids is None else self.ids.shape[1]

    @property
    def here(self) -> ScoreItem:
        return self

    @property
    def place(self) -> None:
        return None

    @property
    def own_prompt(self) -> None:
        return None

    def after(self, prompt: np.ndarray) -> ScoreItem:
        """The same scored tokens after another prompt (int32 [≥ 1]), for a teacher that reads its own. Rows
        with pictures are not rendered anew (`rollout/teacher_prompts.py`).

        The prompt takes the place of everything before the first scored token; all later tokens stay.

            tokens [1, 7, 9, 8, 2]  positions [2, 3, 4]
            after([5, 5, 6])  →  tokens [5, 5, 6, 9, 8, 2]  positions [3, 4, 5]
        """
        first = int(self.positions[0]) if len(self.positions) else len(self.tokens)
        tokens = np.concatenate([prompt, self.tokens[first:]]).astype(np.int32)
        return replace(self, tokens=tokens, positions=self.positions + np.int32(len(prompt) - first))

    async def fetch(self) -> ScoreItem:
        return self


@dataclass(frozen=True, slots=True)
class TeacherScores:
    """One teacher's scores of one sequence; every logprob is of the full softmax at temperature 1."""

    key: str
    teacher: str
    signal: Signal
    sampled_logprobs: np.ndarray
    """float32 [P]."""
    ids: np.ndarray | None = None
    """int32 [P, K]: `topk` (best first) and `at_ids` (as requested)."""
    logprobs: np.ndarray | None = None
    """float32 [P, K], beside `ids`."""
    hidden: np.ndarray | None = None
    """uint16 [P, H]: the bits of bfloat16 values (`hidden` only); numpy has no bfloat16."""

    replica: str = ""
    """The replica that answered; empty where no pool was asked."""
    version: int = -1
    """The version of the teacher's weights, if it follows the student; −1: the weights it was loaded with."""
    aligned: tuple[int, int, int] | None = None
    """Of a teacher with another tokenizer: the student's tokens that are aligned one to one, in chains, and left
    out."""

    def by(self, replica: str) -> TeacherScores:
        return replace(self, replica=replica)

    async def fetch(self) -> TeacherScores:
        return self

    async def record(self, put: Callable[[TeacherScores], Awaitable[None]]) -> None:
        await put(self)
