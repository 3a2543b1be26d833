"""Tensor parallelism: shards a model that is too large for one device over the ranks of a replica.

Each rank holds a shard of every attention and feed-forward projection (by the plan of transformers' models),
of every expert too, and a shard of the head's rows. A layer needs two all-reduces. Of the head only logsumexps, candidates and
single logits are exchanged.

Rank 0 answers HTTP and broadcasts what to score (`lockstep.py`); all ranks run the same forward.

Legend: V vocabulary, H hidden size, E experts, I an expert's inner size.
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
from understudy.teacher.scoring.model import body_of

WHOLE = (
    "embedding_rowwise",
    "replicated_with_grad_allreduce",
    "sequence_parallel",
    "colwise_gather_output",
)
"""Styles of a plan that are kept whole here: embeddings and norms. The head is sharded separately."""
WHOLE_ATTENTION = "rowwise_split_input"
"""The output projection of an attention whose heads are normed together: all of that attention is kept whole."""
EXPERTS = "moe_tp_experts"


@dataclass(frozen=True, slots=True)
class ReplicaRank:
    """This process's rank in its replica."""

    rank: int
    world: int


def join(place: ReplicaRank, rendezvous: str, device: str) -> None:
    """Join the replica's process group; `rendezvous` is tcp://host:port or file:///path."""
    backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
    if device.startswith("cuda"):
        torch.cuda.set_device(torch.device(device))
    dist.init_process_group(
        backend,
        init_method=rendezvous,
        world_size=place.world,
        rank=place.rank,
        # Ranks wait in a broadcast for the next request, which may take any time.
        timeout=timedelta(days=30),
    )


class RowSharded(nn.Module):
    """A linear layer that holds some of its input columns; the ranks' outputs sum to the whole output."""

    def __init__(self, linear: nn.Linear, place: ReplicaRank) -> None:
        super().__init__()
        self.weight = nn.Parameter(_part(linear.weight, 1, place), requires_grad=False)
        # One rank adds the bias; otherwise it would be added once per rank.
        self.bias = linear.bias if place.rank == 0 else None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        total = F.linear(inputs, self.weight, self.bias)
        dist.all_reduce(total)
        return total


def shard_layers(model: Any, place: ReplicaRank) -> None:
    """Shard the projections of every decoder layer in place, by the model's own plan."""
    plan: Mapping[str, str] = getattr(model.config.get_text_config(), "base_model_tp_plan", None) or {}
    if not plan:
        raise TeacherError(
            f"{type(model).__name__} brings no tensor-parallel plan; serve it with one device per replica"
        )
    _check_divisible(model, place)
    body = body_of(model)
    for name, module in list(body.named_modules()):
        style = _style_of(name, plan)
        if style is None or style in WHOLE or (style == WHOLE_ATTENTION and ".self_attn." in name):
            continue
        if style == EXPERTS:
            _shard_experts(name, module, place)
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


def _shard_experts(name: str, experts: nn.Module, place: ReplicaRank) -> None:
    """Each rank gets a shard of every expert's inner size, so all ranks work on every token whatever its experts
    are. The ranks' outputs sum to the whole output."""
    found = dict(experts.named_parameters())
    gate_up, down = (found.pop(key, torch.empty(0, 0, 0)) for key in ("gate_up_proj", "down_proj"))
    if found or not down.numel() or gate_up.shape[1:] != (2 * down.shape[2], down.shape[1]):
        raise TeacherError(
            f"{name}: experts of {type(experts).__name__} are not stored as [E, 2·I, H] and [E, H, I], which is the layout that can be "
            "cut here; serve the model with one device per replica, or behind vLLM"
        )
    if down.shape[2] % place.world:
        raise TeacherError(
            f"the experts' inner size {down.shape[2]} cannot be cut into {place.world} equal parts; choose a divisor of it"
        )
    halves = [_part(half, 1, place) for half in gate_up.chunk(2, 1)]
    experts.gate_up_proj = nn.Parameter(torch.cat(halves, 1), requires_grad=False)
    experts.down_proj = nn.Parameter(_part(down, 2, place), requires_grad=False)
    experts.register_forward_hook(_summed)


def _summed(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(output)
    return output


def _style_of(name: str, plan: Mapping[str, str]) -> str | None:
    return plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))


def _check_divisible(model: Any, place: ReplicaRank) -> None:
    config = model.config.get_text_config()
    for field in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        count = getattr(config, field, None)
        if count is not None and count % place.world:
            raise TeacherError(
                f"{field} = {count} cannot be cut into {place.world} equal parts; choose a divisor of it"
            )


def _part(tensor: torch.Tensor, dim: int, place: ReplicaRank) -> torch.Tensor:
    """This rank's shard, copied so that the rest of the tensor can be freed."""
    return tensor.detach().chunk(place.world, dim)[place.rank].clone()


def shard_head(head: Head, place: ReplicaRank) -> Head:
    """This rank's rows of the head. The last shard may be shorter, never empty."""
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
