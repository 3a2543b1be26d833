"""One rank leads, the others follow: the trainer talks to a single policy, whatever the number of ranks.

    trainer ──update(batch)──> LeadingPolicy (rank 0) ══command, batch══> follow() on ranks 1 … n−1
                                     │                                        │
                                     └────────── the same Policy call on every rank ┘

A follower waits for commands and makes the same call on its own `Policy`. An error that follows from the batch (it does
not fit, its loss is not finite) arises on every rank alike: the leader raises it, followers wait for the next command.
A follower ends when it is told to or when the leader is gone.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from understudy.errors import UnderstudyError
from understudy.policy.checkpoint import CheckpointStore
from understudy.policy.forward import Objective
from understudy.policy.policy import Policy, StepResult
from understudy.policy.shard import Group
from understudy.policy.state import PolicyState
from understudy.policy.wire import batch_columns, batch_from, jagged_columns, jagged_from, pack, unpack
from understudy.types.batch import Batch
from understudy.types.jagged import Jagged
from understudy.types.loss import TeacherHead

logger = logging.getLogger(__name__)


class LeadingPolicy:
    """Rank 0's policy with the interface of `Policy`; every call is made on all ranks.

    The objective does not travel: followers were started with their own, built from the same recipe.
    """

    def __init__(self, policy: Policy, group: Group) -> None:
        self.policy = policy
        self._group = group
        self._heads: dict[str, TeacherHead] = {}

    @property
    def step(self) -> int:
        return self.policy.step

    @property
    def model(self) -> torch.nn.Module:
        return self.policy.model

    def update(
        self,
        batch: Batch,
        objective: Objective,
        weights: Jagged | Sequence[torch.Tensor],
        max_tokens_per_microbatch: int = 8192,
        *,
        old_logprobs: Jagged | None = None,
        teacher_heads: Mapping[str, TeacherHead] | None = None,
    ) -> StepResult:
        weights = weights if isinstance(weights, Jagged) else Jagged.from_rows(list(weights))
        for name, head in (teacher_heads or {}).items():
            if self._heads.get(name) is not head:
                self._send_head(name, head)
        plain, tensors = batch_columns(batch)
        tensors |= jagged_columns("weights", weights) | jagged_columns("old_logprobs", old_logprobs)
        self._send({"do": "update", "max_tokens": max_tokens_per_microbatch, "batch": plain}, tensors)
        return self.policy.update(
            batch,
            objective,
            weights,
            max_tokens_per_microbatch,
            old_logprobs=old_logprobs,
            teacher_heads=teacher_heads,
        )

    def logprobs(
        self, batch: Batch, max_tokens_per_microbatch: int = 8192, temperature: float = 1.0
    ) -> Jagged:
        plain, tensors = batch_columns(batch)
        options = {"max_tokens": max_tokens_per_microbatch, "temperature": temperature}
        self._send({"do": "logprobs", "batch": plain, **options}, tensors)
        return self.policy.logprobs(batch, max_tokens_per_microbatch, temperature)

    def named_weights(self) -> list[tuple[str, torch.Tensor]]:
        self._send({"do": "named_weights"})
        return self.policy.named_weights()

    def averaged_weights(self) -> list[tuple[str, torch.Tensor]]:
        self._send({"do": "averaged_weights"})
        return self.policy.averaged_weights()

    def state(self) -> PolicyState:
        self._send({"do": "state"})
        return self.policy.state()

    def load_state(self, state: PolicyState) -> None:
        """Sends a whole state to every rank; where ranks share a file system, `load_from` spares the traffic."""
        tensors = {f"model:{name}": tensor for name, tensor in state.model.items()}
        tensors |= {f"optimizer:{name}": tensor for name, tensor in state.optimizer.items()}
        self._send({"do": "load_state", "progress": dict(state.progress)}, tensors)
        self.policy.load_state(state)

    def load_from(self, store: CheckpointStore, step: int) -> None:
        """Every rank reads the checkpoint of `step` itself."""
        self._send({"do": "load_from", "root": str(store.root.resolve()), "step": step})
        self.policy.load_state(store.load(step).policy)

    def close(self) -> None:
        """Sends the followers home."""
        self._send({"do": "stop"})

    def _send_head(self, name: str, head: TeacherHead) -> None:
        """A teacher's head travels once; it is by far the largest thing a step could carry."""
        facts = {"softcap": head.softcap, "logit_scale": head.logit_scale, "temperature": head.temperature}
        tensors = {"weight_VH": head.weight_VH} | ({} if head.bias_V is None else {"bias_V": head.bias_V})
        self._send({"do": "teacher_head", "name": name, "facts": facts}, tensors)
        self._heads[name] = head

    def _send(self, head: Mapping[str, Any], tensors: Mapping[str, torch.Tensor] | None = None) -> None:
        _broadcast(self._group, pack(head, tensors or {}))


def follow(policy: Policy, objective: Objective, group: Group) -> None:
    """Makes the leader's calls on this rank until it says stop. A lost leader ends the wait with a RuntimeError."""
    heads: dict[str, TeacherHead] = {}
    while True:
        head, tensors = unpack(_broadcast(group))
        if head["do"] == "stop":
            return
        try:
            _obey(policy, objective, heads, head, tensors)
        except UnderstudyError as error:
            logger.warning("rank %d: %s", group.rank, error)


def _obey(
    policy: Policy,
    objective: Objective,
    heads: dict[str, TeacherHead],
    head: Mapping[str, Any],
    tensors: dict[str, torch.Tensor],
) -> None:
    match head["do"]:
        case "update":
            weights = jagged_from("weights", tensors)
            assert weights is not None
            old = jagged_from("old_logprobs", tensors)
            batch = batch_from(head["batch"], tensors)
            policy.update(
                batch, objective, weights, head["max_tokens"], old_logprobs=old, teacher_heads=heads
            )
        case "logprobs":
            policy.logprobs(batch_from(head["batch"], tensors), head["max_tokens"], head["temperature"])
        case "named_weights":
            policy.named_weights()
        case "averaged_weights":
            policy.averaged_weights()
        case "state":
            policy.state()
        case "load_from":
            policy.load_state(CheckpointStore(head["root"]).load(head["step"]).policy)
        case "load_state":
            model, optimizer = (
                {
                    name.removeprefix(f"{kind}:"): tensor
                    for name, tensor in tensors.items()
                    if name.startswith(f"{kind}:")
                }
                for kind in ("model", "optimizer")
            )
            policy.load_state(PolicyState(model, optimizer, head["progress"]))
        case "teacher_head":
            weight_VH, bias_V = tensors["weight_VH"].to(policy.device), tensors.get("bias_V")
            bias_V = bias_V if bias_V is None else bias_V.to(policy.device)
            heads[head["name"]] = TeacherHead(weight_VH=weight_VH, bias_V=bias_V, **head["facts"])


def _broadcast(group: Group, message: bytes | None = None) -> bytes:
    """Rank 0's bytes on every rank."""
    size = torch.tensor([len(message) if message is not None else 0])
    dist.broadcast(size, src=0, group=group.host)
    if message is None:
        buffer = torch.empty(int(size), dtype=torch.uint8)
    else:
        buffer = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    dist.broadcast(buffer, src=0, group=group.host)
    return buffer.numpy().tobytes() if message is None else message
