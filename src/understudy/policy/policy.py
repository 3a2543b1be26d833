"""The student being trained: one `update` per step, whatever the objective.

    batch ──plan──> micro-batches ──forward, objective, backward──> gradients ──check──> clip ──AdamW──> new weights

The caller computes the reduction weights once for the whole batch, so every micro-batch loss is a plain sum and the
result does not depend on how the batch was split. A loss or gradient that is not finite stops the step *before* the
weights are touched and names the rows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from transformers import PreTrainedModel

from understudy.errors import CheckpointError, PolicyError
from understudy.policy.assemble import Assembler, MicroBatch
from understudy.policy.forward import (
    Objective,
    StudentForward,
    attention_for,
    choose_layout,
    sampled_logprobs,
)
from understudy.policy.head import verify_head
from understudy.policy.load import context_length, switch_off_dropout
from understudy.policy.microbatch import Layout, plan_microbatches
from understudy.policy.optimizer import AdamWSettings, MasterAdamW, assign
from understudy.policy.schedule import Schedule
from understudy.policy.state import PolicyState, random_state, restore_random_state
from understudy.types.batch import Batch
from understudy.types.jagged import Jagged
from understudy.types.loss import LossOutput, TeacherHead
from understudy.types.loss_metrics import Metric, merge_metrics, metrics_to_host

BadRows = Callable[[Batch, str], None]
"""Called with the rows that broke a step and the reason, before the error is raised: the place to save them for replay."""


@dataclass(frozen=True, slots=True)
class PolicySettings:
    schedule: Schedule = field(default_factory=Schedule)
    adamw: AdamWSettings = field(default_factory=AdamWSettings)
    gradient_checkpointing: bool = False
    loss_temperature: float = 1.0
    """Divides the student's logits in the loss; declared apart from the rollout's temperature."""
    layout: Layout | None = None
    """How rows lie in a forward pass; None chooses by device and dtype."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """One optimizer step."""

    step: int
    """Counted from 0; the next step is one more."""
    loss: float
    grad_norm: float
    """Before clipping."""
    learning_rate: float
    metrics: Mapping[str, Metric]
    """What the objective measured, added up over the micro-batches, on the host."""
    tokens: int
    """Tokens that went through the model."""
    loss_tokens: int
    """Tokens that bore loss."""
    micro_batches: int
    row_losses: tuple[float, ...]
    """Σ of each row's per-token losses before reduction weights, in the batch's row order; 0 where a row bears no loss."""
    row_tokens: tuple[int, ...]
    """Loss-bearing tokens of each row."""
    seconds: Mapping[str, float]
    """Wall time of `prepare`, `compute` (forward and backward) and `optimizer`."""


class Policy:
    """A causal language model, its optimizer and its place in the schedule."""

    def __init__(
        self, model: PreTrainedModel, settings: PolicySettings, on_bad_rows: BadRows | None = None
    ) -> None:
        self.model = model
        self.settings = settings
        self.on_bad_rows = on_bad_rows
        self.step = 0
        self.context_length = context_length(model)
        self.vocab_size = int(model.get_input_embeddings().weight.shape[0])
        switch_off_dropout(model)
        verify_head(model)
        self.layout = settings.layout or choose_layout(model)
        if settings.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
        self.forward = StudentForward(model, settings.loss_temperature)
        self.optimizer = MasterAdamW(model.named_parameters(), settings.adamw)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

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
        """One optimizer step on `batch`.

        `weights` are the reduction weights of every loss-bearing token over the *global* batch ([P] per row): the loss of
        the step is Σ weights · per-token loss. `old_logprobs` and `teacher_heads` are passed on to the objective.
        """
        started = time.perf_counter()
        assembler = Assembler(batch, weights, old_logprobs, teacher_heads)
        rows = self._trainable_rows(assembler)
        plan = self._plan(assembler, rows, max_tokens_per_microbatch)
        self.optimizer.zero_grad()
        seconds = {"prepare": time.perf_counter() - started, "compute": 0.0, "optimizer": 0.0}
        mark = time.perf_counter()
        try:
            with attention_for(self.model, self.layout):
                outputs = [self._accumulate(assembler.cut(group, self.layout), objective) for group in plan]
                loss = float(torch.stack([output.loss for output in outputs]).double().sum())
                grad_norm = self.optimizer.grad_norm()
                if not (math.isfinite(loss) and math.isfinite(grad_norm)):
                    raise self._refusal(assembler, objective, plan, outputs, loss, grad_norm)
        except BaseException:
            self.optimizer.zero_grad()
            raise
        seconds["compute"] = time.perf_counter() - mark
        mark = time.perf_counter()
        learning_rate = self.settings.schedule.at(self.step)
        self.optimizer.step(learning_rate, grad_norm)
        seconds["optimizer"] = time.perf_counter() - mark
        self.step += 1
        return StepResult(
            step=self.step - 1,
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            metrics=metrics_to_host(merge_metrics(output.metrics for output in outputs)),
            tokens=int(assembler.token_lengths[rows].sum()),
            loss_tokens=int(assembler.loss_offsets[-1]),
            micro_batches=len(plan),
            row_losses=_row_sums(assembler, plan, outputs),
            row_tokens=tuple(assembler.loss_offsets.diff().tolist()),
            seconds=seconds,
        )

    @torch.no_grad()
    def logprobs(
        self, batch: Batch, max_tokens_per_microbatch: int = 8192, temperature: float = 1.0
    ) -> Jagged:
        """float32 [P] per row: log-probabilities of the written tokens under the current weights."""
        counts = [int(mask.sum()) for mask in batch.loss_mask]
        assembler = Assembler(batch, [torch.zeros(count) for count in counts])
        found: list[torch.Tensor] = [torch.zeros(0) for _ in counts]
        with attention_for(self.model, self.layout):
            for group in self._plan(assembler, self._trainable_rows(assembler), max_tokens_per_microbatch):
                micro = assembler.cut(group, self.layout).to(self.device)
                values = self.forward(micro, sampled_logprobs, temperature=temperature).cpu()
                for row, piece in zip(group, values.split([counts[row] for row in group]), strict=True):
                    found[row] = piece
        return Jagged.from_rows(found)

    def state(self) -> PolicyState:
        """Everything an exact continuation needs. The tensors are the live ones: save or copy them before the next step."""
        return PolicyState(
            model=unique_tensors(self.model),
            optimizer=self.optimizer.state(),
            progress={"step": self.step, "random": random_state()},
        )

    def load_state(self, state: PolicyState) -> None:
        """Continues from a saved state, in place: whoever shares the weights' memory sees the restored ones."""
        mine = unique_tensors(self.model)
        missing, unknown = sorted(mine.keys() - state.model.keys()), sorted(state.model.keys() - mine.keys())
        if missing or unknown:
            raise CheckpointError(
                f"the checkpoint does not fit the student: missing {missing[:3] or 'nothing'}, unknown {unknown[:3] or 'nothing'}; "
                "was the run started with another model?"
            )
        for name, tensor in state.model.items():
            if tensor.shape != mine[name].shape or tensor.dtype != mine[name].dtype:
                raise CheckpointError(
                    f"the checkpoint holds {name} as {tensor.dtype} {tuple(tensor.shape)}, the student has {mine[name].dtype} "
                    f"{tuple(mine[name].shape)}; resume with the model and dtype the run was started with"
                )
        self.optimizer.load_state(state.optimizer)
        with torch.no_grad():
            for name, tensor in state.model.items():
                assign(mine[name], tensor)
        self.step = int(state.progress["step"])
        restore_random_state(state.progress["random"])

    def _accumulate(self, micro: MicroBatch, objective: Objective) -> LossOutput:
        output: LossOutput = self.forward(micro.to(self.device), objective)
        output.loss.backward()
        return replace(output, loss=output.loss.detach())

    def _trainable_rows(self, assembler: Assembler) -> list[int]:
        """Rows that bear loss, after the checks that would otherwise surface as an index error deep in a kernel."""
        batch, lengths = assembler.batch, assembler.token_lengths
        rows = assembler.rows_with_loss()
        if not rows:
            raise PolicyError(
                f"none of the {len(batch)} rows of this batch bears loss: every loss mask is empty"
            )
        if int(lengths.max()) > self.context_length:
            row = int(lengths.argmax())
            raise PolicyError(
                f"row {batch.keys[row]} has {int(lengths[row])} tokens, the student's context holds {self.context_length}; "
                "lower rollout.max_new_tokens or the prompt length"
            )
        low, high = (int(bound) for bound in torch.aminmax(batch.tokens.values))
        if low < 0 or high >= self.vocab_size:
            raise PolicyError(
                f"token ids run from {low} to {high}, the student's vocabulary from 0 to {self.vocab_size - 1}"
            )
        return rows

    def _plan(self, assembler: Assembler, rows: Sequence[int], max_tokens: int) -> list[list[int]]:
        keys, names = assembler.batch.keys, assembler.groups()
        plan: list[list[int]] = []
        for name in sorted({names[row] for row in rows}):
            mine = [row for row in rows if names[row] == name]
            lengths = assembler.token_lengths[mine].tolist()
            groups = plan_microbatches(lengths, [keys[row] for row in mine], max_tokens, self.layout)
            plan += [[mine[place] for place in group] for group in groups]
        return plan

    def _refusal(
        self,
        assembler: Assembler,
        objective: Objective,
        plan: list[list[int]],
        outputs: list[LossOutput],
        loss: float,
        grad_norm: float,
    ) -> PolicyError:
        """Finds the rows by running the suspects one by one, hands them to the callback, and words the error."""
        suspects = [
            row
            for group, part in zip(plan, outputs, strict=True)
            if not torch.isfinite(part.loss)
            for row in group
        ]
        everyone = [row for group in plan for row in group]
        bad = [row for row in suspects or everyone if not self._is_sound(assembler, row, objective)]
        what = f"loss {loss}" if not math.isfinite(loss) else f"gradient norm {grad_norm}"
        names = ", ".join(assembler.batch.keys[row] for row in bad[:8]) + (" …" if len(bad) > 8 else "")
        where = f"{len(bad)} row(s): {names}" if bad else "no single row: only their sum overflows"
        reason = f"step {self.step} stopped with {what}; {where}. The weights were not touched"
        if self.on_bad_rows is not None:
            self.on_bad_rows(assembler.batch.select(bad or everyone), reason)
        return PolicyError(reason)

    def _is_sound(self, assembler: Assembler, row: int, objective: Objective) -> bool:
        self.optimizer.zero_grad()
        output = self._accumulate(assembler.cut([row], self.layout), objective)
        return bool(torch.isfinite(output.loss)) and math.isfinite(self.optimizer.grad_norm())


def _row_sums(assembler: Assembler, plan: list[list[int]], outputs: list[LossOutput]) -> tuple[float, ...]:
    """Per-token losses added up by row, in one transfer from the device."""
    counts = assembler.loss_offsets.diff()
    values_N = torch.cat([output.per_token_N.detach() for output in outputs]).to("cpu", torch.float64)
    rows = torch.tensor([row for group in plan for row in group])
    owner_N = rows.repeat_interleave(counts[rows])
    return tuple(torch.zeros(len(counts), dtype=torch.float64).index_add_(0, owner_N, values_N).tolist())


def unique_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name, a tied tensor once, under its first name."""
    seen: set[int] = set()
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor.detach()
    return tensors
