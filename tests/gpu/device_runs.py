"""Records whole runs: every update with its weights, rows and gradients, and generations of the engine at the end.

    understudy.train ──> launch ──> build ──> [Runner._watch] ──> the schedule ──> [published, write_some] ──> close

The test builds nothing itself: it observes the objects that `assembly.build` wired together.
"""

import asyncio
import copy
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import understudy
from understudy.assembly import learner
from understudy.assembly.build import build
from understudy.engines.base import GenerateRequest, Generation, Sampling
from understudy.engines.local import engine as hf
from understudy.engines.local import slots
from understudy.engines.local.kernels import attention as decode_attention
from understudy.engines.local.kernels import fused as fused_decode
from understudy.engines.local.kernels import rms_norm as fused_norm
from understudy.policy.critic import give_value_head
from understudy.policy.microbatch import Layout
from understudy.policy.policy import Policy
from understudy.policy.step import PolicySettings, StepResult
from understudy.run import launch
from understudy.trainers.system import System
from understudy.types.batch import Batch
from understudy.types.jagged import Jagged
from understudy.types.loss import TeacherHead

Weights = dict[str, torch.Tensor]


def varied(row: Mapping[str, Any], text: str) -> float:
    """A reward of 0 … 1, different for nearly every answer."""
    return sum(map(ord, text)) % 11 / 10


def as_float32(model: torch.nn.Module) -> Weights:
    """A float32 copy of every parameter on the host."""
    return {
        name: tensor.detach().to("cpu", torch.float32, copy=True) for name, tensor in model.named_parameters()
    }


def masters_of(policy: Policy) -> Weights:
    return {
        name: master.detach().to("cpu", torch.float32, copy=True)
        for name, master in policy.optimizer.masters.items()
    }


@dataclass
class Update:
    """Inputs and outputs of one optimizer step."""

    weights: Weights
    masters: Weights
    """The optimizer's float32 copies of the weights."""
    batch: Batch
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    result: StepResult | None = None
    gradients: Weights = field(default_factory=dict)
    """Before clipping; weights without a gradient are left out."""


@dataclass
class Watched:
    """The recorded updates of a student or a critic."""

    policy: Policy
    first: Weights
    updates: list[Update] = field(default_factory=list)

    @staticmethod
    def over(policy: Policy) -> "Watched":
        watched = Watched(policy, as_float32(policy.model))
        update, step = policy.update, policy.optimizer.step

        def watched_update(batch: Batch, *arguments: Any, **options: Any) -> StepResult:
            watched.updates.append(
                Update(as_float32(policy.model), masters_of(policy), batch, arguments, dict(options))
            )
            watched.updates[-1].result = update(batch, *arguments, **options)
            return watched.updates[-1].result

        def watched_step(learning_rate: float, grad_norm: float) -> None:
            watched.updates[-1].gradients = {
                name: master.grad.to("cpu", torch.float32, copy=True)
                for name, master in policy.optimizer.masters.items()
                if master.grad is not None
            }
            step(learning_rate, grad_norm)

        policy.update, policy.optimizer.step = watched_update, watched_step  # type: ignore[method-assign]
        return watched

    @property
    def trained(self) -> list[str]:
        return list(self.policy.optimizer.weights)


@dataclass
class Watch:
    """The record of one run."""

    student: Watched
    critic: Watched | None
    last: Weights = field(default_factory=dict)
    """The weights that the policy would publish after the last step."""
    stale: Weights = field(default_factory=dict)
    """The same before the first step."""
    asked: list[GenerateRequest] = field(default_factory=list)
    written: list[Generation] = field(default_factory=list)
    """Generations of the run's engine after the last step."""
    engine_modules_apart: bool = True
    """Whether an engine in this process shares no module object with the policy."""


async def write_some(system: System) -> tuple[list[GenerateRequest], list[Generation]]:
    rng = np.random.default_rng(0)
    asked = [
        GenerateRequest(
            f"after-{index}",
            rng.integers(100, 1000, int(rng.integers(3, 20))).astype(np.int32),
            Sampling(max_new_tokens=16),
            seed=index,
        )
        for index in range(12)
    ]
    return asked, await system.producer.engine.generate(asked)


def published(policy: Policy) -> Weights:
    return {
        name: tensor.detach().to("cpu", torch.float32, copy=True) for name, tensor in policy.named_weights()
    }


@dataclass
class Runner:
    """Runs recipes and records them."""

    patch: pytest.MonkeyPatch

    def train(self, recipe: dict[str, Any], layout: Layout | None = None) -> tuple[understudy.Run, Watch]:
        return self._watched(lambda: understudy.train(recipe, progress=False), layout)

    def resume(self, path: Path, *overrides: str) -> tuple[understudy.Run, Watch]:
        return self._watched(lambda: asyncio.run(launch.resume(path, overrides, progress=False)), None)

    def _watched(
        self, action: Callable[[], understudy.Run], layout: Layout | None
    ) -> tuple[understudy.Run, Watch]:
        found: list[Watch] = []
        settings = learner.policy_settings

        @asynccontextmanager
        async def watched_build(*arguments: Any) -> AsyncIterator[System]:
            async with build(*arguments) as system:
                watch = self._watch(system)
                yield system
                watch.last = published(watch.student.policy)
                watch.asked, watch.written = await write_some(system)
                found.append(watch)

        with self.patch.context() as patch:
            patch.setattr(launch, "build", watched_build)
            patch.setattr(launch, "write_report", lambda *_: None)
            if layout is not None:
                patch.setattr(
                    learner, "policy_settings", lambda *given: replace(settings(*given), layout=layout)
                )
            run = action()
        return run, found[0]

    def _watch(self, system: System) -> Watch:
        student = Watched.over(system.learner.policy)
        critic = Watched.over(system.learner.critic.policy) if system.learner.critic is not None else None
        watch = Watch(student, critic, stale=published(student.policy))
        if isinstance(system.producer.engine, hf.HFEngine):
            own = {id(module) for module in system.producer.engine._model.modules()}
            watch.engine_modules_apart = not own & {id(module) for module in student.policy.model.modules()}
        return watch


def plain_model(folder: Path, weights: Weights | None = None, *, critic: bool = False) -> PreTrainedModel:
    """Transformers' own model on the host in float32, with these weights."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    if critic:
        give_value_head(model)
    if weights is not None:
        put(model, weights)
    return model


@torch.no_grad()
def put(model: torch.nn.Module, weights: Weights) -> None:
    own = dict(model.named_parameters())
    assert own.keys() == weights.keys()
    for name, tensor in weights.items():
        own[name].copy_(tensor)


def again_on_the_host(folder: Path, watched: Watched, update: Update, *, critic: bool) -> Update:
    """The same update by a policy on the host: float32, padded rows, losses in plain torch."""
    own = watched.policy.settings
    settings = PolicySettings(loss_temperature=own.loss_temperature, lora=own.lora, layout=Layout.PADDED)
    policy = Policy(plain_model(folder, critic=critic), settings)
    put(policy.model, update.weights)
    again = Watched.over(policy)
    objective, *rest = update.arguments
    if hasattr(objective, "backend"):
        objective = replace(objective, backend="torch")
    options = dict(update.options)
    if heads := options.get("teacher_heads"):
        options["teacher_heads"] = {name: _widened(head) for name, head in heads.items()}
    batch = update.batch
    if batch.teacher_hidden is not None:
        hidden = Jagged(batch.teacher_hidden.values.float(), batch.teacher_hidden.offsets)
        batch = replace(batch, teacher_hidden=hidden)
    policy.update(batch, objective, *rest, **options)
    return again.updates[0]


def by_plain_transformers(folder: Path, update: Update) -> tuple[float, Weights]:
    """Loss and gradients of forward KL over the teacher's top K and the rest, by transformers' model and
    autograd alone, one row at a time."""
    model, batch, total = plain_model(folder, update.weights), update.batch, 0.0
    tokens_of_all = sum(int(mask.sum()) for mask in batch.loss_mask)
    assert batch.teacher_ids is not None and batch.teacher_topk_logprobs is not None
    for row in range(len(batch.keys)):
        tokens, written = batch.tokens[row].long(), batch.loss_mask[row].bool()
        logprobs = model(input_ids=tokens[None]).logits[0].log_softmax(-1)[:-1][written[1:]]
        theirs = batch.teacher_topk_logprobs[row].float()
        ours = logprobs.gather(1, batch.teacher_ids[row].long())
        rest_p, rest_q = 1 - theirs.exp().sum(1), 1 - ours.exp().sum(1)
        divergence = (theirs.exp() * (theirs - ours)).sum(1) + rest_p * (rest_p.log() - rest_q.log())
        share = divergence.sum() / tokens_of_all
        share.backward()
        total += share.item()
    return total, {name: tensor.grad for name, tensor in model.named_parameters() if tensor.grad is not None}


def _widened(head: TeacherHead) -> TeacherHead:
    bias = None if head.bias_V is None else head.bias_V.float().cpu()
    return replace(head, weight_VH=head.weight_VH.float().cpu(), bias_V=bias)


@torch.no_grad()
def mismatch(model: PreTrainedModel, watch: Watch) -> float:
    """Mean distance between the engine's logprobs of its generated tokens and those of this model."""
    distances = []
    for request, generation in zip(watch.asked, watch.written, strict=True):
        tokens = torch.from_numpy(np.concatenate([request.tokens, generation.tokens])).long()
        logprobs = model(input_ids=tokens[None]).logits[0, :-1].log_softmax(-1)
        own = logprobs.gather(1, tokens[1:, None])[len(request.tokens) - 1 :, 0]
        distances.append((own - torch.from_numpy(generation.logprobs)).abs())
    return float(torch.cat(distances).mean())


# --- the GPU's code paths on the host ------------------------------------------------------------------------


def kernels_on_the_host(patch: pytest.MonkeyPatch) -> None:
    """Makes an engine on the host use slots, queue steps ahead and put decode kernels into its modules, as on a
    GPU. The kernels are plain torch here and, like the real ones, have no gradient."""

    def without_gradient(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return torch.no_grad()(function)

    def norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(x.dtype)

    def turned(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * cosine[:, None] + torch.cat([-second, first], -1) * sine[:, None]

    def heads(query, key, value, weights, epsilon, cosine, sine, slots_B, lengths_B, pool):  # type: ignore[no-untyped-def]
        if weights is not None:
            query, key = norm(query, weights[0], epsilon), norm(key, weights[1], epsilon)
        pool.write(slots_B, lengths_B, turned(key, cosine, sine), value)
        return turned(query, cosine, sine)

    patch.setattr(hf, "KERNEL_DEVICES", {"cuda", "cpu"})
    patch.setattr(slots, "RUN_AHEAD", {"cuda", "cpu"})

    def add_norm(
        x: torch.Tensor, before: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return x + before, norm(x + before, weight, epsilon)

    patch.setattr(slots, "FUSED", {"cuda", "cpu"})
    patch.setattr(fused_norm, "rms_norm", without_gradient(norm))
    patch.setattr(fused_norm, "add_norm", torch.no_grad()(add_norm))
    patch.setattr(fused_decode, "silu_times", without_gradient(lambda g, u: torch.nn.functional.silu(g) * u))
    patch.setattr(fused_decode, "place_heads", without_gradient(heads))
    patch.setattr(decode_attention, "slot_attention", decode_attention.slot_attention_plain)
    patch.setattr(decode_attention, "kernel_fits", lambda *_: True)


def with_changes(table: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the table with the changes `section__key` → value."""
    table = copy.deepcopy(table)
    for path, value in changes.items():
        *sections, key = path.split("__")
        place = table
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value
    return table
