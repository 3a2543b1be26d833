"""A trajectory while it grows: prompt, then what the model wrote, then what the world answered, by token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from understudy.engines.base import Generation
from understudy.types.trajectory import StopReason, Trajectory


class Transcript:
    """Keeps the streams aligned; tokens go in once and are never changed."""

    def __init__(self, prompt: np.ndarray) -> None:
        self._tokens: list[np.ndarray] = []
        self._masks: list[np.ndarray] = []
        self._logprobs: list[np.ndarray] = []
        self._versions: list[np.ndarray] = []
        self._candidates: list[np.ndarray | None] = []
        self._stop_reason = StopReason.ABORTED
        self.turns = 0
        self.generated = 0
        """Tokens the student wrote so far, over all turns."""
        self.observe(prompt)

    @property
    def tokens(self) -> np.ndarray:
        """int32 [T]: everything so far."""
        return np.concatenate(self._tokens)

    def __len__(self) -> int:
        return sum(map(len, self._tokens))

    def observe(self, tokens: np.ndarray) -> None:
        """Tokens the student did not write: seen, never trained on."""
        self._tokens.append(np.asarray(tokens, dtype=np.int32))
        self._masks.append(np.zeros(len(tokens), dtype=bool))
        self._logprobs.append(np.full(len(tokens), np.nan, dtype=np.float32))
        self._versions.append(np.full(len(tokens), -1, dtype=np.int32))

    def write(self, generation: Generation) -> None:
        """One turn of the student."""
        self._tokens.append(generation.tokens)
        self._masks.append(np.ones(len(generation.tokens), dtype=bool))
        self._logprobs.append(generation.logprobs)
        self._versions.append(generation.weight_versions)
        self._candidates.append(generation.candidate_ids)
        self._stop_reason = generation.stop_reason
        self.turns += 1
        self.generated += len(generation.tokens)

    def finish(
        self,
        key: str,
        *,
        stop_reason: StopReason | None = None,
        metrics: Mapping[str, float] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Trajectory:
        """The trajectory; it stopped for the reason its last turn did, unless another is given."""
        return Trajectory(
            key=key,
            tokens=self.tokens,
            loss_mask=np.concatenate(self._masks),
            behaviour_logprobs=np.concatenate(self._logprobs),
            weight_versions=np.concatenate(self._versions),
            stop_reason=stop_reason or self._stop_reason,
            turns=self.turns,
            metrics=dict(metrics or {}),
            extra=dict(extra or {}),
            candidate_ids=self._candidate_ids(),
        )

    def _candidate_ids(self) -> np.ndarray | None:
        """The candidates of all turns, where every turn has some."""
        turns = [ids for ids in self._candidates if ids is not None]
        return np.concatenate(turns) if turns and len(turns) == len(self._candidates) else None
