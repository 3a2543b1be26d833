"""The policy's state for checkpoints: named tensors and JSON, no pickle.

Tensors go to safetensors files by name, the rest is JSON. Names are the model's own parameter names. So a
checkpoint does not depend on parameter order, and a run sharded over four ranks can continue on one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class PolicyState:
    """The policy at the end of a step."""

    model: Mapping[str, torch.Tensor]
    """Weights and persistent buffers, each tensor once (a tied head is not repeated)."""
    optimizer: Mapping[str, torch.Tensor]
    """`exp_avg/NAME`, `exp_avg_sq/NAME`, `step/NAME`; with low-precision weights `master/NAME`; with an
    average `ema/NAME`."""
    progress: Mapping[str, Any] = field(default_factory=dict)
    """JSON: the step count and the states of the random generators."""

    def detached(self) -> PolicyState:
        """A copy in host memory that later steps cannot change (for saving in the background)."""

        def copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}

        return PolicyState(copies(self.model), copies(self.optimizer), dict(self.progress))

    def tensors(self, model: str = "model:", optimizer: str = "optimizer:") -> dict[str, torch.Tensor]:
        """All tensors in one dict, for a message or a file. The prefixes say whose a tensor is."""
        found = {f"{model}{name}": tensor for name, tensor in self.model.items()}
        return found | {f"{optimizer}{name}": tensor for name, tensor in self.optimizer.items()}

    @staticmethod
    def of_tensors(
        tensors: Mapping[str, torch.Tensor],
        progress: Mapping[str, Any],
        model: str = "model:",
        optimizer: str = "optimizer:",
    ) -> PolicyState:
        """The inverse of `tensors`. Tensors with neither prefix are left out."""

        def under(prefix: str) -> dict[str, torch.Tensor]:
            return {
                name.removeprefix(prefix): tensor
                for name, tensor in tensors.items()
                if name.startswith(prefix)
            }

        return PolicyState(under(model), under(optimizer), progress)


def storable(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors as safetensors wants them: on the host, contiguous, none sharing memory with another."""
    seen: set[int] = set()
    result: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        place = plain.untyped_storage().data_ptr()
        result[name] = plain.clone() if place in seen else plain
        seen.add(place)
    return result


def random_state() -> dict[str, str]:
    """The states of torch's generators as hex text."""
    state = {"cpu": bytes(torch.get_rng_state().tolist()).hex()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            state[f"cuda:{index}"] = bytes(torch.cuda.get_rng_state(index).tolist()).hex()
    return state


def restore_random_state(state: Mapping[str, str]) -> None:
    """Restores what `random_state` wrote; generators of devices that this machine lacks are skipped."""
    for device, text in state.items():
        values = torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)
        if device == "cpu":
            torch.set_rng_state(values)
        elif torch.cuda.is_available() and int(device.removeprefix("cuda:")) < torch.cuda.device_count():
            torch.cuda.set_rng_state(values, int(device.removeprefix("cuda:")))


def unique_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name, a tied tensor once, under its first name."""
    seen: set[int] = set()
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor.detach()
    return tensors
