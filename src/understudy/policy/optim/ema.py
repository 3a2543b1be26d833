"""An exponential average of the weights, for evaluation and export."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from understudy.errors import CheckpointError, PolicyError
from understudy.policy.optim.adamw import assign


class WeightAverage:
    """average ← decay · average + (1 − decay) · weights, in float32, after every step. It starts as the weights."""

    def __init__(self, masters: Mapping[str, torch.Tensor], decay: float) -> None:
        if not 0.0 < decay < 1.0:
            raise PolicyError(f"ema_decay = {decay}: expected a number between 0 and 1, such as 0.999")
        self.decay = decay
        self._masters = dict(masters)
        self.values: dict[str, torch.Tensor] = {
            name: master.detach().clone() for name, master in masters.items()
        }

    @torch.no_grad()
    def follow(self) -> None:
        """Updates the average with the weights of the step just made."""
        torch._foreach_lerp_(
            list(self.values.values()),
            [master.detach() for master in self._masters.values()],
            1.0 - self.decay,
        )

    def state(self) -> dict[str, torch.Tensor]:
        return {f"ema/{name}": value for name, value in self.values.items()}

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restores the `ema/NAME` tensors of a saved state."""
        for name, value in self.values.items():
            if f"ema/{name}" not in tensors:
                raise CheckpointError(
                    f"the checkpoint holds no average of {name}; was the run started with ema_decay?"
                )
            assign(value, tensors[f"ema/{name}"])
