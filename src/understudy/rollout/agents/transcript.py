"""Builds a trajectory token by token: the prompt, then the model's turns and the observations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from understudy.engines.base import Generation
from understudy.types.trajectory import StopReason, Trajectory


class Transcript:
    """The tokens of one session so far, append-only, with aligned streams. Used by agent loops."""

    def __init__(self, prompt: np.ndarray) -> None:
        self._tokens: list[np.ndarray] = []
        self._written: list[tuple[int, Generation]] = []
        """(start, generation) of each turn of the student."""
        self._length = 0
        self.generated = 0
        """Tokens that the student wrote so far, in all turns."""
        self.observe(prompt)

    @property
    def tokens(self) -> np.ndarray:
        """int32 [T]: everything so far."""
        return self._tokens[0] if len(self._tokens) == 1 else np.concatenate(self._tokens)

    @property
    def turns(self) -> int:
        return len(self._written)

    def __len__(self) -> int:
        return self._length

    def observe(self, tokens: np.ndarray) -> None:
        """Append tokens that the student did not write; they are never trained on."""
        self._tokens.append(np.asarray(tokens, dtype=np.int32))
        self._length += len(tokens)

    def write(self, generation: Generation) -> None:
        """Append one turn of the student."""
        self._written.append((self._length, generation))
        self._tokens.append(generation.tokens)
        self._length += len(generation.tokens)
        self.generated += len(generation.tokens)

    def finish(
        self,
        key: str,
        *,
        stop_reason: StopReason | None = None,
        metrics: Mapping[str, float] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Trajectory:
        """The trajectory. Its stop reason is that of the last turn, unless one is given."""
        loss_mask = np.zeros(self._length, bool)
        logprobs = np.full(self._length, np.nan, np.float32)
        versions = np.full(self._length, -1, np.int32)
        last = StopReason.ABORTED
        for start, turn in self._written:
            own = slice(start, start + len(turn.tokens))
            loss_mask[own], logprobs[own], versions[own] = True, turn.logprobs, turn.weight_versions
            last = turn.stop_reason
        return Trajectory(
            key=key,
            tokens=self.tokens,
            loss_mask=loss_mask,
            behaviour_logprobs=logprobs,
            weight_versions=versions,
            stop_reason=stop_reason or last,
            turns=self.turns,
            metrics=dict(metrics or {}),
            extra=dict(extra or {}),
            candidate_ids=self._candidate_ids(),
        )

    def _candidate_ids(self) -> np.ndarray | None:
        """The candidates of all turns, where every turn has some."""
        turns = [turn.candidate_ids for _, turn in self._written if turn.candidate_ids is not None]
        return np.concatenate(turns) if turns and len(turns) == self.turns else None
