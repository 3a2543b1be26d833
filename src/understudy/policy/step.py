"""Settings of a policy, and the result of one of its steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from understudy.policy.lora import LoraSettings
from understudy.policy.microbatch import Layout
from understudy.policy.optim.adamw import AdamWSettings
from understudy.policy.optim.schedule import Schedule
from understudy.policy.refused import RefusedRows
from understudy.types.loss_metrics import Metric
from understudy.types.usable_ids import UsableIds

BadRows = Callable[[RefusedRows], None]
"""Called with the rows that broke a step and the reason, before the error is raised, to save them for
replay."""


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """Settings of a policy, fixed for a run."""

    schedule: Schedule = field(default_factory=Schedule)
    adamw: AdamWSettings = field(default_factory=AdamWSettings)
    gradient_checkpointing: bool = False
    compile: bool = False
    """Compiles the decoder layers (`nn/compiled_layers.py`)."""
    loss_temperature: float = 1.0
    """Divides the student's logits in the loss; independent of the rollout's temperature."""
    layout: Layout | None = None
    """Layout of rows in a forward pass; None chooses by device and dtype."""
    lora: LoraSettings | None = None
    """Trains small adapters; the weights themselves stay frozen."""
    lanes: int = 1
    """Micro-batches in parallel, on as many threads (`cpu/lanes.py`): for a small student on a CPU, on one rank.
    """
    usable: UsableIds | None = None
    """The ids that the student's softmax runs over; None: all rows of its head."""
    freeze_vision: bool = True
    """Trains the language part of a vision-language student alone."""
    ema_decay: float | None = None
    """Keeps an exponential average of the weights beside them, for evaluation and export."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one optimizer step, or of all optimizer steps of one batch together."""

    step: int
    """The trainer step it belongs to, counted from 0."""
    loss: float
    grad_norm: float
    """Before clipping."""
    learning_rate: float
    metrics: Mapping[str, Metric]
    """The objective's metrics, merged over the micro-batches, on the host."""
    tokens: int
    """Tokens that went through the model."""
    loss_tokens: int
    """Tokens that bore loss."""
    micro_batches: int
    row_losses: tuple[float, ...]
    """Σ of each row's per-token losses before reduction weights, in the batch's row order; 0 where a row bears no loss."""
    row_distill: tuple[float, ...]
    """The same of the distillation term alone, before its coefficient."""
    row_tokens: tuple[int, ...]
    """Loss-bearing tokens of each row."""
    seconds: Mapping[str, float]
    """Wall time of `prepare`, `compute` (forward and backward) and `optimizer`, and of `ahead`: the forward
    pass made while teachers scored."""
    updates: int = 1
    """Optimizer steps taken."""
