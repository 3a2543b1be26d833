"""The student being trained: one `update` per optimizer step, for any objective.

    batch ──plan──> micro-batches ──forward, objective, backward──> gradients ──check──> clip ──AdamW──> weights

The caller computes the reduction weights once for the whole batch, so every micro-batch loss is a plain sum
and the result does not depend on how the batch was split. A loss or gradient that is not finite stops the
step *before* the weights change, and the error names the rows.

A *step* is the trainer's: one batch. It may take several updates (mini-batches, epochs); the last one has
`ends_step` set. Schedule, checkpoints and weight versions count steps; `updates` counts optimizer steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from understudy.errors import PolicyError
from understudy.media.processor import PictureReader
from understudy.nn.compiled_layers import compile_layers
from understudy.nn.vision import freeze_vision, is_vision, vision_parameters
from understudy.policy.assemble import Assembler
from understudy.policy.bad_rows import refusal
from understudy.policy.checkpoints.state import PolicyState, random_state, restore_random_state
from understudy.policy.cpu.head_start import HeadStart, HeadStarts
from understudy.policy.forward.forward import (
    Objective,
    StudentForward,
    attention_for,
    choose_layout,
    sampled_logprobs,
)
from understudy.policy.forward.head import body_of, output_layer, verify_head
from understudy.policy.load import context_length, switch_off_dropout, switch_off_router_noise
from understudy.policy.lora import add_lora
from understudy.policy.optim.adamw import MasterAdamW
from understudy.policy.optim.ema import WeightAverage
from understudy.policy.plan import Plan, border_of, by_length, lanes_of, plan_step
from understudy.policy.ranks.shard import Ranks, SingleRank
from understudy.policy.rows import hold_rows, row_sums, trainable_rows, without_graph
from understudy.policy.step import BadRows, PolicySettings, StepResult
from understudy.policy.student_weights import StudentWeights
from understudy.policy.token_watch import TokenWatch
from understudy.types.batch import Batch
from understudy.types.batch_ref import BatchRef
from understudy.types.jagged import Jagged
from understudy.types.loss import LossInputs, LossOutput, StudentHead, TeacherHead
from understudy.types.loss_metrics import merge_metrics, metrics_to_host


class Policy:
    """A causal language model, its optimizer and its place in the schedule. Updates run on the
    trainer's update thread, one at a time.

    With several `ranks` every rank makes the same calls with the same whole batch, takes its own share of the
    rows and fetches that share.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        settings: PolicySettings,
        on_bad_rows: BadRows | None = None,
        ranks: Ranks | None = None,
        pictures: PictureReader | None = None,
    ) -> None:
        self.model = model
        self.settings = settings
        self.on_bad_rows = on_bad_rows
        self.ranks: Ranks = ranks or SingleRank()
        if settings.lanes > 1 and (self.ranks.size > 1 or settings.compile):
            raise PolicyError("lanes are for a student on one rank whose layers are not compiled")
        self.rotary_border = border_of(model)
        self.lanes = lanes_of(settings.lanes, self.rotary_border)
        self.step = 0
        """Trainer steps taken."""
        self.updates = 0
        """Optimizer steps taken; more than `step` if batches are cut into mini-batches."""
        self.context_length = context_length(model)
        self.vocab_size = int(model.get_input_embeddings().weight.shape[0])
        self.weight_dtype = output_layer(model).weight.dtype
        switch_off_dropout(model)
        switch_off_router_noise(model)
        verify_head(model)
        if is_vision(model) and settings.freeze_vision:
            freeze_vision(model)
            if settings.lora is not None:
                settings = replace(settings, lora=replace(settings.lora, language_only=True))
                self.settings = settings
        if settings.lora is not None:
            add_lora(model, settings.lora)
        self.layout = choose_layout(model, settings.layout)
        if settings.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if settings.compile and not compile_layers(body_of(model)):
            raise PolicyError(
                f"{type(model).__name__} keeps its layers where compiling them is not supported; set student.compile = false"
            )
        model.train()
        self.forward = StudentForward(model, settings.loss_temperature, settings.usable, pictures)
        dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
        self.ranks.shard(self.forward, self.weight_dtype)
        self.optimizer = MasterAdamW(model.named_parameters(), settings.adamw, dtypes)
        vision = {id(one) for one in vision_parameters(model)} if is_vision(model) else set()
        self._vision = frozenset(name for name, one in self.optimizer.weights.items() if id(one) in vision)
        """Those of the trained weights that only rows with pictures use."""
        decay = settings.ema_decay
        self.average = WeightAverage(self.optimizer.masters, decay) if decay is not None else None
        self._weights = StudentWeights(model, settings.lora, self.ranks, dtypes, self.optimizer, self.average)
        self._head_starts = HeadStarts()

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _own_device(self) -> AbstractContextManager[object]:
        """Kernels go to the current device, which in a new thread is the first one, not the student's."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    @property
    def can_head_start(self) -> bool:
        """Whether `begin_head_start` may be called: on a CPU, where waiting for teachers is idle time, and on one
        rank, because several would have to agree."""
        return self.device.type == "cpu" and self.ranks.size == 1

    def begin_head_start(
        self, rows: Callable[[], Batch | None], max_tokens_per_microbatch: int = 8192
    ) -> None:
        """Starts the first forward pass of the next update on a thread of its own and returns at once
        (`head_start.py`). `rows` is called on that thread and returns the update's batch as far as it is
        known: only tokens and loss mask are read. Until it is taken, a head start holds as much memory as a
        micro-batch in training."""
        if not self.can_head_start:
            raise PolicyError("a head start is for a student on a CPU, on one rank")
        self._head_starts.begin(partial(self._compute_head_start, rows, max_tokens_per_microbatch))

    def _compute_head_start(self, rows: Callable[[], Batch | None], max_tokens: int) -> HeadStart:
        started = time.perf_counter()
        batch = rows()
        if batch is None:
            raise PolicyError("no row of this batch is trained on")
        assembler = Assembler(batch, _no_weights(batch))
        plan = self.plan(assembler, trainable_rows(assembler, self.context_length), max_tokens)
        hold_rows(assembler, plan, self.ranks, self.vocab_size)
        micros = [assembler.cut(group, self.layout) for group in plan.mine[: self.lanes.count]]
        with attention_for(self.model, self.layout):
            passes = list(zip(micros, self.lanes.run(self.forward.hidden, micros), strict=True))
        return HeadStart(self.updates, passes, time.perf_counter() - started)

    def update(
        self,
        batch: BatchRef,
        objective: Objective,
        weights: Jagged | Sequence[torch.Tensor],
        max_tokens_per_microbatch: int = 8192,
        *,
        old_logprobs: Jagged | None = None,
        teacher_heads: Mapping[str, TeacherHead] | None = None,
        ends_step: bool = True,
        watch: TokenWatch | None = None,
    ) -> StepResult:
        """One optimizer step on `batch`.

        `weights` are the reduction weights of every loss-bearing token over the *global* batch ([P] per
        row): the loss of the step is Σ weights · per-token loss. `old_logprobs` and `teacher_heads` are
        passed to the objective. `ends_step` is False if further updates of the same trainer step follow.
        `watch` records what this pass computes for each token of a few rows.
        """
        started = time.perf_counter()
        head_start = self._head_starts.take()
        ahead = head_start.seconds if head_start is not None else 0.0
        assembler = Assembler(batch, weights, old_logprobs, teacher_heads)
        rows = trainable_rows(assembler, self.context_length)
        plan = self.plan(assembler, rows, max_tokens_per_microbatch)
        hold_rows(assembler, plan, self.ranks, self.vocab_size)
        self.optimizer.zero_grad()
        planned = time.perf_counter()
        try:
            with self._own_device(), attention_for(self.model, self.layout):
                outputs = self.accumulate(assembler, plan, objective, head_start, watch)
                del head_start
                sums = self.ranks.total(row_sums(assembler, plan.mine, outputs))
                loss, (row_losses, row_distill) = float(sums[0]), sums[1:].view(2, -1).tolist()
                self.optimizer.check_reach(() if assembler.any_pictures(plan.rows()) else self._vision)
                grad_norm = self.optimizer.grad_norm()
                if not (math.isfinite(loss) and math.isfinite(grad_norm)):
                    raise refusal(self, assembler, objective, rows, loss, grad_norm)
        except BaseException:
            self.optimizer.zero_grad()
            self.ranks.settle(self.forward)
            raise
        computed = time.perf_counter()
        learning_rate = self.settings.schedule.at(self.step)
        self.optimizer.step(learning_rate, grad_norm)
        if self.average is not None:
            self.average.follow()
        self.updates += 1
        if watch is not None:
            watch.gather(self.ranks)
        step = self.step
        if ends_step:
            self.step += 1
        return StepResult(
            step=step,
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            metrics=self.ranks.merged(metrics_to_host(merge_metrics(output.metrics for output in outputs))),
            tokens=int(assembler.token_lengths[rows].sum()),
            loss_tokens=int(assembler.loss_offsets[-1]),
            micro_batches=plan.rounds,
            row_losses=tuple(row_losses),
            row_distill=tuple(row_distill),
            row_tokens=tuple(assembler.loss_offsets.diff().tolist()),
            seconds={
                "ahead": ahead,
                "prepare": planned - started,
                "compute": computed - planned,
                "optimizer": time.perf_counter() - computed,
            },
        )

    def skip_step(self) -> None:
        """A trainer step without an update (the critic warms up, or no row is left to train on)."""
        self.step += 1

    def logprobs(
        self, batch: BatchRef, max_tokens_per_microbatch: int = 8192, temperature: float = 1.0
    ) -> Jagged:
        """float32 [P] per row: log-probabilities of the written tokens under the current weights."""
        return self.read(batch, sampled_logprobs, max_tokens_per_microbatch, temperature)

    @torch.no_grad()
    def read(
        self,
        batch: BatchRef,
        reader: Callable[[StudentHead, LossInputs], torch.Tensor],
        max_tokens_per_microbatch: int = 8192,
        temperature: float = 1.0,
    ) -> Jagged:
        """float32 [P] per row: `reader`'s value for each loss-bearing token under the current weights."""
        self._head_starts.wait()
        assembler = Assembler(batch, _no_weights(batch))
        plan = self.plan(assembler, trainable_rows(assembler, self.context_length), max_tokens_per_microbatch)
        hold_rows(assembler, plan, self.ranks, self.vocab_size)
        found = torch.zeros(int(assembler.loss_offsets[-1]), dtype=torch.float64)

        @torch.no_grad()
        def read_pass(which: tuple[list[int], bool]) -> None:
            group, counted = which
            micro = assembler.cut(group, self.layout).to(self.device)
            _, values = self.forward(micro, reader, temperature=temperature)
            if counted:
                found[assembler.loss_places(group)] = values.to("cpu", torch.float64)

        with self._own_device(), attention_for(self.model, self.layout):
            self.lanes.run(read_pass, list(plan.passes()))
        self.ranks.settle(self.forward)
        return Jagged(self.ranks.total(found).to(torch.float32), assembler.loss_offsets)

    def named_weights(self) -> list[tuple[str, torch.Tensor]]:
        """Whole weights by name in the student's dtype, tied ones once, adapters merged in: the form engines
        load. Collective: every rank must call it."""
        return self._weights.named(self.weight_dtype)

    def named_adapters(self) -> list[tuple[str, torch.Tensor]]:
        """The adapters alone, with the hash of the weights they belong to, for an engine that merges them
        itself (`engines.adapters`). Collective: every rank must call it."""
        return self._weights.adapters()

    def averaged_weights(self) -> list[tuple[str, torch.Tensor]]:
        """The running average of the weights, in the form of `named_weights`."""
        return self._weights.averaged()

    def state(self) -> PolicyState:
        """Everything needed to continue exactly, on any number of ranks. Collective: every rank must call
        it, and rank 0 has the result. On one rank the tensors are the live ones: save or copy them before the next
        step."""
        progress: dict[str, Any] = {"step": self.step, "updates": self.updates, "random": random_state()}
        if self.settings.lora is not None:
            progress["lora"] = self.settings.lora.as_json()
        return PolicyState(self._weights.saved_model(), self._weights.saved_optimizer(), progress)

    def load_state(self, state: PolicyState) -> None:
        """Continues from a saved state. Weights are restored in place, so an engine that shares their memory
        has them too."""
        self._head_starts.take()
        self._weights.restore(state.model, state.optimizer)
        self.step = int(state.progress["step"])
        self.updates = int(state.progress.get("updates", self.step))
        restore_random_state(state.progress["random"])

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """The weights of a saved state alone, for a policy that is not trained further."""
        self._head_starts.take()
        self._weights.restore_model(weights)

    def accumulate(
        self,
        assembler: Assembler,
        plan: Plan,
        objective: Objective,
        head_start: HeadStart | None = None,
        watch: TokenWatch | None = None,
    ) -> list[LossOutput]:
        """Forward and backward of this rank's micro-batches; gradients add up over micro-batches and ranks."""
        if self.lanes.count > 1:
            return self._accumulate_in_lanes(assembler, plan, objective, head_start, watch)
        outputs = []
        micros = assembler.cut_ahead(plan.passes(), self.layout, self.device)
        for place, (micro, counted) in enumerate(micros):
            known_NH = head_start.take(place, micro, self.updates) if head_start is not None else None
            watched = objective if watch is None or not counted else watch.around(objective, micro)
            loss, output = self.forward(micro, watched, known_NH=known_NH)
            del known_NH
            # FSDP averages gradients over ranks; the loss is a sum.
            (loss * self.ranks.size if self.ranks.size > 1 else loss).backward()
            if counted:
                outputs.append(without_graph(output, loss))
        return outputs

    def _accumulate_in_lanes(
        self,
        assembler: Assembler,
        plan: Plan,
        objective: Objective,
        head_start: HeadStart | None,
        watch: TokenWatch | None,
    ) -> list[LossOutput]:
        """`accumulate` on several threads: each pass keeps its own gradients, and they are added up in the
        plan's order."""
        weights = list(self.optimizer.weights.values())

        def one(place: int) -> tuple[LossOutput, tuple[torch.Tensor | None, ...]]:
            micro = assembler.cut(plan.mine[place], self.layout)
            known_NH = head_start.take(place, micro, self.updates) if head_start is not None else None
            watched = objective if watch is None else watch.around(objective, micro)
            loss, output = self.forward(micro, watched, known_NH=known_NH)
            return without_graph(output, loss), torch.autograd.grad(loss, weights, allow_unused=True)

        outputs = []
        for first in range(0, len(plan.mine), self.lanes.count):
            places = range(first, min(first + self.lanes.count, len(plan.mine)))
            for output, gradients in self.lanes.run(one, places):
                self.optimizer.add_gradients(gradients)
                outputs.append(output)
        return outputs

    def plan(self, assembler: Assembler, rows: Sequence[int], max_tokens: int) -> Plan:
        lengths = assembler.token_lengths.tolist()
        return plan_step(
            rows,
            lengths,
            assembler.keys,
            by_length(assembler.groups(), lengths, self.rotary_border),
            max_tokens,
            self.layout,
            self.ranks.rank,
            self.ranks.size,
            self.lanes.count,
        )


def _no_weights(batch: BatchRef) -> Jagged:
    """Zero reduction weights, for a pass without a loss."""
    offsets = torch.tensor([0, *batch.loss_lengths], dtype=torch.int64).cumsum(0)
    return Jagged(torch.zeros(int(offsets[-1])), offsets)


def untouched(policy: Policy) -> bool:
    """Whether a failed call changed nothing: no gradient is left, so the optimizer did not step. One rank
    only."""
    return (
        policy.ranks.size == 1
        and all(weight.grad is None for weight in policy.optimizer.weights.values())
        and all(master.grad is None for master in policy.optimizer.masters.values())
    )
