"""Low-rank adapters through peft (an optional extra): the base stays frozen, small matrices beside it learn.

Adapters are put into the model in place, so that body, head and forward stay what they are. Engines and exports get
merged weights under the base model's own names; checkpoints hold the adapters alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from understudy.errors import PolicyError

_ADAPTER = "default"
_BASE = ".base_layer"


@dataclass(frozen=True, slots=True)
class LoraSettings:
    rank: int = 16
    alpha: float = 32.0
    """The adapter's product is scaled by alpha / rank."""
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Last parts of the names of the linear layers that get an adapter."""
    seed: int = 0
    """Of the adapters' first values: every rank must start from the same."""

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "targets": list(self.targets)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> LoraSettings:
        return cls(**{**values, "targets": tuple(values["targets"])})


def add_lora(model: nn.Module, settings: LoraSettings) -> None:
    """Freezes the model and puts adapters into it; the outputs are unchanged until the first step."""
    try:
        peft = importlib.import_module("peft")
    except ImportError as error:
        raise PolicyError("LoRA needs the peft package: pip install 'understudy[lora]'") from error
    config = peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=list(settings.targets),
        lora_dropout=0.0,
        bias="none",
    )
    with torch.random.fork_rng():
        torch.manual_seed(settings.seed)
        try:
            peft.inject_adapter_in_model(config, model, adapter_name=_ADAPTER)
        except ValueError as error:
            raise PolicyError(
                f"LoRA targets {list(settings.targets)} do not fit {type(model).__name__}: {error}"
            ) from error
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)


def is_adapter(name: str) -> bool:
    return "lora_" in name


@torch.no_grad()
def merged_weights(
    model: nn.Module, whole: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
) -> list[tuple[str, torch.Tensor]]:
    """Every weight of the base model by its own name, adapters added in. `whole` gathers a sharded tensor.

    The product is added in float32 and rounded once, so that merging costs at most half a unit in the last place.
    """
    merged = []
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            continue
        weight = whole(parameter.detach())
        if name.endswith(f"{_BASE}.weight"):
            layer: Any = model.get_submodule(name.removesuffix(f"{_BASE}.weight"))
            down_RI = whole(layer.lora_A[_ADAPTER].weight.detach()).float()
            up_OR = whole(layer.lora_B[_ADAPTER].weight.detach()).float()
            weight = (weight.float() + layer.scaling[_ADAPTER] * (up_OR @ down_RI)).to(weight.dtype)
        merged.append((name.replace(_BASE, ""), weight))
    return merged
