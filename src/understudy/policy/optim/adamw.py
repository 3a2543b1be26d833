"""AdamW with float32 master weights, for weights of any dtype.

With bfloat16 weights most updates are smaller than half a unit in the last place and would be rounded away.
So the optimizer keeps float32 copies, adds up gradients in float32, steps those, and rounds once into the
model's weights. With float32 weights the masters *are* the weights and nothing is copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from understudy.errors import CheckpointError, PolicyError
from understudy.policy.optim.adamw_8bit import AdamW8bit, fresh_state, local, own_scales, whole_scales

_PLAIN_KINDS = frozenset({"step", "exp_avg", "exp_avg_sq"})


@dataclass(frozen=True, slots=True)
class AdamWSettings:
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    """On matrices only; not on norms and biases."""
    grad_clip: float | None = 1.0
    """Largest global gradient norm; None does not clip."""
    offload: bool = False
    """Keeps masters, gradients and moments in host memory and steps there: 12 bytes a parameter less on the
    device, slower steps. With several ranks each rank keeps those of its own shard."""
    kind: Literal["adamw", "adamw_8bit"] = "adamw"
    """How moments are stored: float32, or one byte each (`adamw_8bit.py`)."""


class MasterAdamW:
    """The optimizer of one model. State is kept by parameter name, so it does not depend on parameter order."""

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        settings: AdamWSettings,
        stored_dtypes: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        """`stored_dtypes`: the dtype each weight is stored in, where it trains in another: sharded weights
        are float32 masters of a half-precision student."""
        self.settings = settings
        self.weights: dict[str, nn.Parameter] = {name: p for name, p in named_parameters if p.requires_grad}
        if not self.weights:
            raise PolicyError("the student has no trainable parameters")
        self.masters: dict[str, torch.Tensor] = {}
        for name, weight in self.weights.items():
            if weight.dtype == torch.float32 and not settings.offload:
                self.masters[name] = weight
            else:
                self.masters[name] = _on_master_device(weight.detach(), settings.offload).requires_grad_()
                weight.register_post_accumulate_grad_hook(_into_master(self.masters[name], settings.offload))
        self.separate = tuple(
            name for name, weight in self.weights.items() if self.masters[name] is not weight
        )
        known = stored_dtypes or {name: weight.dtype for name, weight in self.weights.items()}
        self.stored = tuple(name for name in self.weights if known[name] != torch.float32)
        """Names of weights whose float32 masters are saved as well, because the stored weights are less
        precise."""
        matrices = [master for master in self.masters.values() if master.dim() >= 2]
        others = [master for master in self.masters.values() if master.dim() < 2]
        groups = [
            {"params": params, "weight_decay": decay}
            for params, decay in ((matrices, settings.weight_decay), (others, 0.0))
            if params
        ]
        self.sharded = any(isinstance(master, DTensor) for master in self.masters.values())
        self.adamw: torch.optim.Optimizer
        if settings.kind == "adamw_8bit":
            self.adamw = AdamW8bit(groups, betas=settings.betas, eps=settings.epsilon)
        else:
            self.adamw = torch.optim.AdamW(
                groups,
                lr=0.0,
                betas=settings.betas,
                eps=settings.epsilon,
                **({"foreach": True} if self.sharded else {"fused": True}),
            )

    def zero_grad(self) -> None:
        for weight in self.weights.values():
            weight.grad = None
        for master in self.masters.values():
            master.grad = None

    def add_gradients(self, found: Sequence[torch.Tensor | None]) -> None:
        """Adds what one backward pass found for `weights`, in their order, as `backward` itself would."""
        for (name, weight), grad in zip(self.weights.items(), found, strict=True):
            if grad is None:
                continue
            master = self.masters[name]
            if master.grad is None:
                # A copy laid out like the weight: two weights may share one gradient tensor, or it may be
                # transposed.
                master.grad = torch.empty_like(weight).copy_(grad).to(master.device, torch.float32)
            else:
                master.grad += grad.to(master.device)

    def grad_norm(self) -> float:
        """The global norm of the gradients added up so far, over all ranks."""
        grads = [master.grad for master in self.masters.values() if master.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def check_reach(self, unused: Collection[str] = ()) -> None:
        """Refuses a step whose gradient reached less than half of the weights: its loss and norm look
        normal, but it would train almost nothing. Some weights may legitimately have no gradient (an expert
        that no token was routed to). `unused`: weights that no row of the update uses; they do not count."""
        counted = {name: master for name, master in self.masters.items() if name not in unused}
        without = [name for name, master in counted.items() if master.grad is None]
        if 2 * len(without) > len(counted):
            raise PolicyError(
                f"the gradient reached only {len(counted) - len(without)} of {len(counted)} weights, none of "
                f"{', '.join(without[:3])} …: something in the forward pass cuts them off (a layer with other code, a detached "
                "tensor). The weights were not touched"
            )

    def step(self, learning_rate: float, grad_norm: float) -> None:
        """One clipped update; the caller has already refused a norm that is not finite."""
        if not math.isfinite(grad_norm):
            raise PolicyError(f"refusing an update with gradient norm {grad_norm}")
        clip = self.settings.grad_clip
        if clip is not None and grad_norm > clip:
            scale = clip / (grad_norm + 1e-6)
            torch._foreach_mul_(
                [master.grad for master in self.masters.values() if master.grad is not None], scale
            )
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate
        self.adamw.step()
        with torch.no_grad():
            for name in self.separate:
                local(self.weights[name]).copy_(local(self.masters[name]))
        self.zero_grad()

    def state(self) -> dict[str, torch.Tensor]:
        """Every tensor needed to continue exactly, by `kind/parameter name`; sharded tensors stay sharded.
        Collective: every rank must call it."""
        tensors: dict[str, torch.Tensor] = {
            f"master/{name}": self.masters[name].detach() for name in self.stored
        }
        for name, master in self.masters.items():
            for kind, value in self.adamw.state.get(master, {}).items():
                scales = kind.endswith("_scales")
                tensors[f"{kind}/{name}"] = whole_scales(value, master) if scales else value
        return tensors

    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restores a saved state after `check_state`; the model's weights are restored already."""
        by_kind = self.check_state(tensors)
        masters = by_kind.pop("master", {})
        with torch.no_grad():
            for name, tensor in masters.items():
                assign(self.masters[name], tensor)
            for name in self.separate:
                if name not in masters:
                    local(self.masters[name]).copy_(local(self.weights[name]))
        for name, master in self.masters.items():
            # AdamW keeps its step count on the host, unless its fused kernel counts.
            counter = torch.device("cpu") if self.sharded else master.device
            self.adamw.state[master] = {
                kind: _placed(found[name], kind, master, counter)
                for kind, found in by_kind.items()
                if name in found
            }

    def check_state(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
        """The tensors by kind and name; a parameter that is missing, new or of another shape is an error
        that names it. A weight that never had a gradient has no moments yet, of any kind."""
        by_kind: dict[str, dict[str, torch.Tensor]] = {"master": {}} if self.stored else {}
        for key, tensor in tensors.items():
            kind, _, name = key.partition("/")
            by_kind.setdefault(kind, {})[name] = tensor
        packed = self.settings.kind == "adamw_8bit"
        kinds = fresh_state(torch.zeros(1)).keys() if packed else _PLAIN_KINDS
        if foreign := sorted(by_kind.keys() - kinds - {"master"}):
            raise CheckpointError(
                f"the checkpoint's optimizer state has {', '.join(foreign)}, which {self.settings.kind} does not know; "
                "resume with the optimizer the run was started with"
            )
        moments = [found for kind, found in by_kind.items() if kind != "master"]
        stepped = set().union(*moments) & self.weights.keys()
        if stepped:
            for kind in sorted(kinds):
                by_kind.setdefault(kind, {})
        for kind, found in by_kind.items():
            expected = set(self.stored) if kind == "master" else stepped
            if found.keys() != expected:
                missing, unknown = sorted(expected - found.keys())[:3], sorted(found.keys() - expected)[:3]
                raise CheckpointError(
                    f"the optimizer state {kind!r} does not fit the student: missing {missing or 'nothing'}, "
                    f"unknown {unknown or 'nothing'}; was the run started with another model?"
                )
            for name, tensor in found.items():
                shape = self.masters[name].shape
                if kind != "step" and not kind.endswith("_scales") and tensor.shape != shape:
                    raise CheckpointError(
                        f"the optimizer state {kind}/{name} has shape {tuple(tensor.shape)}, the student has {tuple(shape)}"
                    )
        return by_kind


def _placed(saved: torch.Tensor, kind: str, master: torch.Tensor, counter: torch.device) -> torch.Tensor:
    """A saved tensor on the device of its parameter's master; packed moments keep their own dtype."""
    if kind == "step":
        return saved.to(counter, copy=True)
    if kind.endswith("_scales"):
        return own_scales(saved, master).to(master.device, copy=True)
    return like(saved, master, saved.dtype if kind.endswith("_codes") else None)


def assign(target: torch.Tensor, full: torch.Tensor) -> None:
    """Copies a whole tensor into a target in place; into a sharded target, this rank's shard of it."""
    target.copy_(like(full, target))


def like(full: torch.Tensor, target: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A fresh tensor with `full`'s values, placed as `target` is (device, shards), in `dtype` or the target's."""
    moved = full.to(device=target.device, dtype=dtype or target.dtype, copy=True)
    if isinstance(target, DTensor):
        return _distribute(moved, target)
    return moved


def _distribute(full: torch.Tensor, target: DTensor) -> DTensor:
    return distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None)


def _on_master_device(tensor: torch.Tensor, offload: bool) -> torch.Tensor:
    """A float32 copy, in host memory if the optimizer is offloaded; a shard stays a shard, on the same
    ranks."""
    device = torch.device("cpu") if offload else tensor.device
    if not isinstance(tensor, DTensor):
        return tensor.to(device, torch.float32, copy=True)
    mesh = tensor.device_mesh
    if mesh.device_type != device.type:
        mesh = _host_mesh(mesh.size())
    return DTensor.from_local(
        tensor.to_local().to(device, torch.float32, copy=True),
        mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


@cache
def _host_mesh(size: int) -> DeviceMesh:
    """A device mesh of the default group's ranks over host memory (gloo)."""
    return init_device_mesh("cpu", (size,))


def _into_master(master: torch.Tensor, offload: bool) -> Callable[[torch.Tensor], None]:
    """Adds each gradient to the float32 one as soon as it is complete, and frees it."""

    def accumulate(weight: torch.Tensor) -> None:
        assert weight.grad is not None
        if master.grad is None:
            shard = isinstance(master, DTensor)
            master.grad = (
                _on_master_device(weight.grad, offload)
                if shard
                else weight.grad.to(master.device, torch.float32)
            )
        else:
            local(master.grad).add_(local(weight.grad).to(master.device))
        weight.grad = None

    return accumulate
