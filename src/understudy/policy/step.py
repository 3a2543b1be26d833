"""What an update is told once, and what it says of each step."""

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
"""Called with the rows that broke a step and the reason, before the error is raised: the place to save them for replay."""


@dataclass(frozen=True, slots=True)
class PolicySettings:
    schedule: Schedule = field(default_factory=Schedule)
    adamw: AdamWSettings = field(default_factory=AdamWSettings)
    gradient_checkpointing: bool = False
    compile: bool = False
    """Compiles the decoder layers (`compiled.py`)."""
    loss_temperature: float = 1.0
    """Divides the student's logits in the loss; declared apart from the rollout's temperature."""
    layout: Layout | None = None
    """How rows lie in a forward pass; None chooses by device and dtype."""
    lora: LoraSettings | None = None
    """Trains small adapters and leaves the weights themselves frozen."""
    lanes: int = 1
    """Micro-batches at a time, on as many threads (`lanes.py`): for a small student on a CPU, on one rank."""
    usable: UsableIds | None = None
    """The ids that the student's softmax runs over; None: all rows of its head."""
    ema_decay: float | None = None
    """Keeps an exponential average of the weights beside them, for evaluation and export."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """One optimizer step, or several of one batch added up."""

    step: int
    """The trainer's step it belongs to, counted from 0."""
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
    """Wall time of `prepare`, `compute` (forward and backward) and `optimizer`, and of what was done `ahead` of them, while
    teachers were at work."""
    updates: int = 1
    """Optimizer steps it took."""
