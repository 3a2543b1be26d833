"""`System`: the parts of one run, assembled by `assembly/build.py` and used by produce and update."""

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
    """Counts of the run so far. Only `rows_trained` includes earlier launches."""

    rows_trained: int = 0
    dead_letters: int = 0
    issued: int = 0
    steps_without_advantage: int | None = 0
    """Counted from the first step of this launch. None once a step had an advantage or the user was told."""


@dataclass
class MicroBatches:
    """The size of micro-batches in this launch (`learn/out_of_memory.py`)."""

    most_tokens: int | None = None
    """What the GPU's memory allows, if that is less than the recipe's size."""

    def tokens(self, recipe: Recipe) -> int:
        return recipe.trainer.micro_batch_tokens if self.most_tokens is None else self.most_tokens


@dataclass(frozen=True)
class System:
    """The parts of one run. Both trainers and their tasks use it on the event loop."""

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
    """By teacher. Empty unless rows carry hidden states."""
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
    """Each teacher's manifest, stored with checkpoints and compared on resume."""
    saver: BackgroundSaver
    background: asyncio.TaskGroup
    """Tasks beside the steps. A failure in one of them ends the run."""
    best: BestSoFar
    critic: ValueModel | None = None
    """The value model of a run whose advantages need one."""
    reference: FrozenModel | None = None
    """The frozen model of a run with a KL penalty to a reference."""
    far_rows: LeadingRows | None = None
    """The source from which ranks fetch their own rows. None: the trainer's process reads a batch and sends
    it to them."""
    row_workers: RowWorkers | None = None
    """Workers on other machines that write their rows themselves. None: the trainer's process writes every
    row."""
    far_scoring: FarScoring | None = None
    """Scores the rows of such workers."""
    turnstile: Turnstile | None = None
    """The gate that rollouts pass, if a publish waits for them."""
    tally: Tally = field(default_factory=Tally)
    micro_batches: MicroBatches = field(default_factory=MicroBatches)
    timings: BatchTimings = field(default_factory=BatchTimings)
    """Time per phase of the rows made since the last step."""
    saving: set[asyncio.Task[None]] = field(default_factory=set)
    """Checkpoints that are being written."""
