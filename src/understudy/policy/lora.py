"""Low-rank adapters through peft (an optional extra): the base is frozen, the adapters train.

Adapters are put into the model in place, so body, head and forward do not change. Engines and exports get
merged weights under the base model's own names; engine processes may get the adapters alone
(`student.lora.publish`). Checkpoints hold the adapters alone.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from understudy.errors import PolicyError
from understudy.media.processor import VISION_PARTS
from understudy.weights.adapters import base_mark, merged, packed_adapter, packed_mark

_ADAPTER = "default"
_BASE = ".base_layer"


@dataclass(frozen=True, slots=True)
class LoraSettings:
    rank: int = 16
    alpha: float = 32.0
    """The adapter's product is scaled by alpha / rank."""
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Suffixes of the names of the linear layers that get an adapter."""
    seed: int = 0
    """Seed of the adapters' initial values, the same on every rank."""
    language_only: bool = False
    """Of a vision-language student: no adapters in its vision part."""

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "targets": list(self.targets)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> LoraSettings:
        return cls(**{**values, "targets": tuple(values["targets"])})


def add_lora(model: nn.Module, settings: LoraSettings) -> None:
    """Freezes the model and puts adapters into it; its outputs do not change until the first step."""
    peft, config = _peft(), peft_config(settings)
    with torch.random.fork_rng():
        torch.manual_seed(settings.seed)
        try:
            peft.inject_adapter_in_model(config, model, adapter_name=_ADAPTER)
        except ValueError as error:
            raise PolicyError(
                f"LoRA targets {list(settings.targets)} do not fit {type(model).__name__}: {error}"
            ) from error
    # peft also adapts what transformers keeps in one tensor (experts); `merged_weights` knows linear layers alone.
    wrapped = [name for name, one in model.named_modules() if hasattr(one, "parameter_name")]
    if wrapped:
        raise PolicyError(
            f"LoRA targets {list(settings.targets)} name weights of experts in {type(model).__name__} ({wrapped[0]}), whose adapters "
            'cannot be merged here; set student.lora.targets to other layers: ["q_proj", "k_proj", "v_proj", "o_proj"]'
        )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)


def peft_config(settings: LoraSettings) -> Any:
    """The `peft.LoraConfig` of these adapters."""
    alpha = int(settings.alpha) if settings.alpha.is_integer() else settings.alpha
    left_out = {"exclude_modules": VISION_PARTS} if settings.language_only else {}
    return _peft().LoraConfig(
        r=settings.rank,
        lora_alpha=alpha,
        target_modules=list(settings.targets),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        **left_out,
    )


def peft_name(name: str) -> str:
    """The name of an adapter's tensor in peft's files."""
    return f"base_model.model.{name.replace(f'.{_ADAPTER}.', '.')}"


def adapted_weights(model: nn.Module, targets: Collection[str], *, language_only: bool = False) -> set[str]:
    """The weights of a model without adapters that `add_lora` would give one, by name."""
    return {
        f"{name}.weight"
        for name, _ in model.named_modules()
        if any(f".{name}".endswith(f".{one}") for one in targets)
        and not (language_only and re.fullmatch(VISION_PARTS, name))
    }


def is_adapter(name: str) -> bool:
    return "lora_" in name


@torch.no_grad()
def merged_weights(
    model: nn.Module, whole: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
) -> list[tuple[str, torch.Tensor]]:
    """Every weight of the base model by its own name, adapters merged in. `whole` gathers a sharded tensor."""
    weights = []
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            continue
        weight = whole(parameter.detach())
        if name.endswith(f"{_BASE}.weight"):
            layer: Any = model.get_submodule(name.removesuffix(f"{_BASE}.weight"))
            weight = merged(weight, *_adapter(layer, whole))
        weights.append((name.replace(_BASE, ""), weight))
    return weights


@torch.no_grad()
def adapter_tensors(
    model: nn.Module, mark: bytes, whole: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
) -> list[tuple[str, torch.Tensor]]:
    """The adapters alone, by the names of the weights they belong to, with the mark of their base: the input
    of `engines.adapters`."""
    packed: list[tuple[str, torch.Tensor]] = []
    for name, _ in model.named_parameters():
        if name.endswith(f"{_BASE}.weight"):
            layer: Any = model.get_submodule(name.removesuffix(f"{_BASE}.weight"))
            packed += packed_adapter(name.replace(_BASE, ""), *_adapter(layer, whole))
    return [*packed, packed_mark(mark)]  # the mark is last: the sender reads the device from the first tensor


def mark_of_base(
    model: nn.Module,
    dtypes: Mapping[str, torch.dtype],
    whole: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
) -> bytes:
    """A hash of the frozen weights under the base model's own names, each in its stored dtype."""
    return base_mark(
        (name.replace(_BASE, ""), whole(parameter.detach()).to(dtypes[name]))
        for name, parameter in model.named_parameters()
        if not is_adapter(name)
    )


def _adapter(
    layer: Any, whole: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, float]:
    down_RI = whole(layer.lora_A[_ADAPTER].weight.detach())
    up_OR = whole(layer.lora_B[_ADAPTER].weight.detach())
    return down_RI, up_OR, float(layer.scaling[_ADAPTER])


def _peft() -> Any:
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise PolicyError("LoRA needs the peft package: pip install 'understudy[lora]'") from error
