"""One run's parts, put together by `build` and used by the two verbs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from understudy.config import Recipe
from understudy.observability.live import LiveView
from understudy.observability.metrics import MetricsWriter
from understudy.observability.rundir import RunDir
from understudy.observability.spans import Spans
from understudy.rollout.timing import BatchTimings
from understudy.trainers.call_batching import Lane

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from understudy.dataplane.base import DataPlane
    from understudy.engines.base import Engine, Sampling
    from understudy.losses.objective import Objective
    from understudy.policy.checkpoints.background import BackgroundSaver
    from understudy.policy.checkpoints.checkpoint import CheckpointStore
    from understudy.policy.policy import Policy
    from understudy.policy.ranks.follow import LeadingPolicy
    from understudy.policy.reference import FrozenModel
    from understudy.rollout.agents.registry import Loops
    from understudy.rollout.cursor import PromptCursor
    from understudy.rollout.render import Renderer
    from understudy.rollout.rewards.rewards import Rewards
    from understudy.teacher.pool.pool import TeacherPool
    from understudy.teacher.route import TeacherRouter
    from understudy.trainers.critic.local import ValueModel
    from understudy.trainers.evaluation.best_checkpoint import BestSoFar
    from understudy.trainers.pacing.publish_gate import Turnstile
    from understudy.trainers.pacing.window_cursor import WindowCursor
    from understudy.trainers.remote_rows.batches import LeadingRows
    from understudy.trainers.remote_rows.rollouts import RowWorkers
    from understudy.trainers.remote_rows.scoring import FarScoring
    from understudy.types.loss import TeacherHead
    from understudy.types.prompt import Prompt
    from understudy.weights.publish import WeightPublisher

PARTITION = "train"


@dataclass
class Tally:
    """What the run has done so far, this launch and earlier ones."""

    rows_trained: int = 0
    dead_letters: int = 0
    issued: int = 0
    steps_without_advantage: int | None = 0
    """From the first step of this launch on; None once a step has had an advantage, or the user was told."""


@dataclass
class MicroBatches:
    """What this launch found out about the size of its micro-batches (`out_of_memory.py`)."""

    most_tokens: int | None = None
    """What the GPU's memory allows, where that is less than the recipe asks for."""

    def tokens(self, recipe: Recipe) -> int:
        return recipe.trainer.micro_batch_tokens if self.most_tokens is None else self.most_tokens


@dataclass(frozen=True)
class System:
    recipe: Recipe
    run: RunDir
    tokenizer: PreTrainedTokenizerBase
    renderer: Renderer
    sampling: Sampling
    engine: Engine
    engine_lane: Lane
    policy: Policy | LeadingPolicy
    objective: Objective
    publisher: WeightPublisher
    pools: Mapping[str, TeacherPool]
    router: TeacherRouter | None
    """None when the run has no teacher and learns from rewards alone."""
    teacher_lanes: Mapping[str, Lane]
    teacher_heads: Mapping[str, TeacherHead]
    """By teacher, where rows carry hidden states."""
    plane: DataPlane
    cursor: PromptCursor | WindowCursor
    loops: Loops
    rewards: Rewards
    checkpoints: CheckpointStore
    eval_prompts: Sequence[Prompt]
    metrics: MetricsWriter
    spans: Spans
    view: LiveView
    deterministic: bool
    manifests: Mapping[str, Mapping[str, Any]]
    """What each teacher said it is, stored with checkpoints and compared on resume."""
    saver: BackgroundSaver
    background: asyncio.TaskGroup
    """Work beside the steps; what fails there ends the run."""
    best: BestSoFar
    critic: ValueModel | None = None
    """The value model of a run whose advantages need one."""
    reference: FrozenModel | None = None
    """The frozen model of a run that keeps its student near one."""
    far_rows: LeadingRows | None = None
    """Where ranks fetch their own rows from; None: the trainer's process reads a batch and hands it on."""
    row_workers: RowWorkers | None = None
    """Workers on other machines that write their rows themselves; None: the trainer's process writes every row."""
    far_scoring: FarScoring | None = None
    """How such rows are judged."""
    turnstile: Turnstile | None = None
    """Rollouts pass it, where a publish has to wait for them."""
    tally: Tally = field(default_factory=Tally)
    micro_batches: MicroBatches = field(default_factory=MicroBatches)
    timings: BatchTimings = field(default_factory=BatchTimings)
    """Where the time of the rows made since the last step went."""
    saving: set[asyncio.Task[None]] = field(default_factory=set)
    """Checkpoints under way."""
