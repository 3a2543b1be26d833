"""`Trajectory`: what the student wrote, as one flat token sequence with aligned per-token streams.

There are no padded prompt and response halves. Stream index t belongs to token t; the logits that predict
token t come from position t − 1. The whole system uses this convention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from understudy.types.scores import ScoreItem, Signal

FEEDBACK = "feedback"
"""In `Trajectory.extra` and in a reward's dict: a text about the answer, from a reward or a tool."""


class StopReason(StrEnum):
    EOS = "eos"
    """The model ended its turn."""
    LENGTH = "length"
    """The token budget ran out: the sample is truncated."""
    STOP_STRING = "stop_string"
    ABORTED = "aborted"
    """Interrupted from outside (a weight update, a shutdown); the tokens written so far are kept."""


class Origin(StrEnum):
    """What wrote a trajectory's loss-bearing tokens."""

    STUDENT = "student"
    """An engine drew them from the student: each has a behaviour logprob and a weight version."""
    DATA = "data"
    """They are the row's own answer (`rollout.off_policy`): nothing was drawn."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One rollout.

    Example, T = 5: prompt ``[bos, q]`` then the student wrote ``[a, b, eos]``:

        tokens              [ 1,   7,    9,    8,    2  ]
        loss_mask           [ 0,   0,    1,    1,    1  ]
        behaviour_logprobs  [ nan, nan, -0.3, -1.2, -0.1]
        weight_versions     [-1,  -1,    4,    4,    4  ]
    """

    key: str
    tokens: np.ndarray
    """int32 [T]: everything the model saw or wrote."""
    loss_mask: np.ndarray
    """bool [T]: True on every token the student generated, EOS included, or of a given answer; never on prompt,
    tool or template tokens."""
    behaviour_logprobs: np.ndarray
    """float32 [T]: log-probability under the distribution actually sampled from; NaN where nothing was sampled."""
    weight_versions: np.ndarray
    """int32 [T]: the weight version that wrote the token; −1 where nothing was sampled."""
    stop_reason: StopReason
    turns: int = 1
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    candidate_ids: np.ndarray | None = None
    """int32 [P, K]: the student's own K best ids at each loss-bearing token, if requested."""
    media: tuple[str, ...] | None = None
    """Hashes of its pictures, in the order of their placeholders; None if the student reads no pictures."""
    origin: Origin = Origin.STUDENT

    def __post_init__(self) -> None:
        length = len(self.tokens)
        for name in ("loss_mask", "behaviour_logprobs", "weight_versions"):
            if len(getattr(self, name)) != length:
                raise ValueError(
                    f"trajectory {self.key}: {name} has {len(getattr(self, name))} entries for {length} tokens"
                )
        if self.candidate_ids is not None and len(self.candidate_ids) != int(self.loss_mask.sum()):
            raise ValueError(
                f"trajectory {self.key}: candidate_ids has {len(self.candidate_ids)} rows for "
                f"{int(self.loss_mask.sum())} loss-bearing tokens"
            )

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def loss_length(self) -> int:
        return int(np.count_nonzero(self.loss_mask))

    @property
    def first(self) -> int:
        """The index of the first loss-bearing token; the length if there is none."""
        return int(self.loss_mask.argmax()) if self.loss_length else self.length

    @property
    def candidates(self) -> int:
        return 0 if self.candidate_ids is None else self.candidate_ids.shape[1]

    @property
    def here(self) -> Trajectory:
        return self

    def to_score(self, signal: Signal, k: int) -> ScoreItem:
        ids = self.candidate_ids if signal is Signal.AT_IDS else None
        return ScoreItem(self.key, self.tokens, self.positions, signal, k, ids, self.media or ())

    @property
    def positions(self) -> np.ndarray:
        """int32 [P]: indexes of the loss-bearing tokens, ascending."""
        return np.flatnonzero(self.loss_mask).astype(np.int32)
