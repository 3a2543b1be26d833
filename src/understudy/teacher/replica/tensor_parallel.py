"""A model too large for one device, cut across the processes of one replica.

Each process holds a part of every attention and feed-forward projection (the plan that transformers' models carry) and
a part of the head's rows. Within a layer two sums travel between the processes; of the head only totals and candidates do.

Process 0 answers HTTP and tells the others what to score (`lockstep.py`); all run the same forward in step.

Legend: V vocabulary, H hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from understudy.errors import TeacherError
from understudy.teacher.scoring.head import Head
from understudy.teacher.scoring.head_kernel import VocabularyShard

WHOLE = ("embedding_rowwise", "replicated_with_grad_allreduce", "sequence_parallel", "colwise_gather_output")
"""Parts of a plan that are kept whole here: embeddings and norms; the head is cut on its own."""


@dataclass(frozen=True, slots=True)
class Place:
    """Which of the replica's processes this is."""

    rank: int
    world: int


def join(place: Place, rendezvous: str, device: str) -> None:
    """Meet the replica's other processes; `rendezvous` is tcp://host:port or file:///path."""
    backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
    if device.startswith("cuda"):
        torch.cuda.set_device(torch.device(device))
    dist.init_process_group(
        backend,
        init_method=rendezvous,
        world_size=place.world,
        rank=place.rank,
        # A process waits here for the next request, however long that takes.
        timeout=timedelta(days=30),
    )


class RowSharded(nn.Module):
    """A linear layer that holds some of its input columns; the processes' parts sum to the whole output."""

    def __init__(self, linear: nn.Linear, place: Place) -> None:
        super().__init__()
        self.weight = nn.Parameter(_part(linear.weight, 1, place), requires_grad=False)
        # One process adds the bias, or it would be added once per process.
        self.bias = linear.bias if place.rank == 0 else None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        total = F.linear(inputs, self.weight, self.bias)
        dist.all_reduce(total)
        return total


def shard_layers(model: Any, place: Place) -> None:
    """Cut the projections of every decoder layer in place, as the model's own plan says."""
    plan: Mapping[str, str] = getattr(model.config.get_text_config(), "base_model_tp_plan", None) or {}
    if not plan:
        raise TeacherError(
            f"{type(model).__name__} brings no tensor-parallel plan; serve it with one device per replica"
        )
    _check_divisible(model, place)
    body = model.base_model
    for name, module in list(body.named_modules()):
        style = _style_of(name, plan)
        if style is None or style in WHOLE:
            continue
        if style not in ("colwise", "rowwise") or not isinstance(module, nn.Linear):
            raise TeacherError(
                f"{type(model).__name__}: {name} is to be cut '{style}', which is not supported here; "
                "serve it with one device per replica, or behind vLLM"
            )
        if style == "colwise":
            module.weight = nn.Parameter(_part(module.weight, 0, place), requires_grad=False)
            if module.bias is not None:
                module.bias = nn.Parameter(_part(module.bias, 0, place), requires_grad=False)
        else:
            parent, _, child = name.rpartition(".")
            setattr(body.get_submodule(parent), child, RowSharded(module, place))


def _style_of(name: str, plan: Mapping[str, str]) -> str | None:
    return plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))


def _check_divisible(model: Any, place: Place) -> None:
    config = model.config.get_text_config()
    for field in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        count = getattr(config, field, None)
        if count is not None and count % place.world:
            raise TeacherError(
                f"{field} = {count} cannot be cut into {place.world} equal parts; choose a divisor of it"
            )


def _part(tensor: torch.Tensor, dim: int, place: Place) -> torch.Tensor:
    """A copy, so that the rest of the tensor can be freed."""
    return tensor.detach().chunk(place.world, dim)[place.rank].clone()


def shard_head(head: Head, place: Place) -> Head:
    """This process's rows of the head. The last part may be shorter, never empty."""
    rows = -(-head.vocab // place.world)
    first = rows * place.rank
    if head.vocab <= first:
        raise TeacherError(f"a vocabulary of {head.vocab} cannot be cut into {place.world} parts")
    end = min(first + rows, head.vocab)
    return replace(
        head,
        weight_VH=head.weight_VH[first:end].clone(),
        bias_V=None if head.bias_V is None else head.bias_V[first:end].clone(),
        reader=VocabularyShard(first),
        vocab_size=head.vocab,
        widest_shard=rows,
    )
