"""The parts of one run in three records: what produces rows, what learns from them, what the run keeps.

    System ─┬─ Producer   prompts, engine, agent loops, rewards, teachers   produce/, evaluation/
            ├─ Learner    policy, critic, reference, objective, publisher   learn/
            └─ RunState   run directory, rows, metrics, checkpoints         both, and the schedules

`assembly/build.py` makes them. The schedules (`sync.py`, `fully_async.py`) hold all three; a function takes
the one it needs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from understudy.dataplane.kept_rows import KeptRows
from understudy.observability.live import LiveView
from understudy.observability.metrics import MetricsWriter
from understudy.observability.rundir import RunDir
from understudy.observability.spans import Spans
from understudy.rollout.timing import BatchTimings
from understudy.trainers.call_batching import CallQueue

if TYPE_CHECKING:
    from understudy.dataplane.base import DataPlane
    from understudy.engines.base import Engine, Sampling
    from understudy.losses.objective import Objective
    from understudy.planning.resolved import LearnSettings, ProduceSettings
    from understudy.policy.checkpoints.background import BackgroundSaver
    from understudy.policy.checkpoints.checkpoint import CheckpointStore
    from understudy.policy.policy import Policy
    from understudy.policy.ranks.follow import LeadingPolicy
    from understudy.policy.reference import ReferenceModel
    from understudy.rollout.cursor import PromptCursor
    from understudy.rollout.render import Renderer
    from understudy.rollout.teacher_prompts import TeacherPrompts
    from understudy.teacher.alignment import TokenAligner
    from understudy.teacher.pool.pool import TeacherPool
    from understudy.teacher.route import TeacherRouter
    from understudy.trainers.callbacks import CallbackRunner
    from understudy.trainers.critic.local import ValueModel
    from understudy.trainers.evaluation.best_checkpoint import BestSoFar
    from understudy.trainers.evaluation.evaluator import Evaluator
    from understudy.trainers.learn.batches import Batches
    from understudy.trainers.pacing.publish_gate import PublishGate
    from understudy.trainers.pacing.window_cursor import WindowCursor
    from understudy.trainers.produce.rollouts import Rollouts
    from understudy.types.loss import TeacherHead
    from understudy.types.prompt import Prompt
    from understudy.weights.publish import WeightPublisher


@dataclass
class Tally:
    """Counts of the run so far. `rows_trained` and `dead_letters` include earlier launches."""

    rows_trained: int = 0
    dead_letters: int = 0
    issued: int = 0
    steps_without_advantage: int | None = 0
    """Counted from the first step of this launch. None once a step had an advantage or the user was warned."""


@dataclass
class MicroBatches:
    """The size of micro-batches in this launch (`learn/out_of_memory.py`)."""

    asked: int
    """`trainer.micro_batch_tokens`."""
    most_tokens: int | None = None
    """What the GPU's memory allows, if that is less."""

    @property
    def tokens(self) -> int:
        return self.asked if self.most_tokens is None else self.most_tokens


@dataclass(frozen=True)
class Saves:
    """The checkpoints of a run."""

    store: CheckpointStore
    saver: BackgroundSaver
    best: BestSoFar
    under_way: set[asyncio.Task[None]] = field(default_factory=set)
    """Checkpoints that are being written."""


@dataclass(frozen=True)
class RunState:
    """What a run keeps and shows. Used on the event loop."""

    run: RunDir
    plane: DataPlane
    metrics: MetricsWriter
    spans: Spans
    view: LiveView
    saves: Saves
    background: asyncio.TaskGroup
    """Tasks beside the steps. A failure in one of them ends the run."""
    tally: Tally = field(default_factory=Tally)
    timings: BatchTimings = field(default_factory=BatchTimings)
    """Time per phase of the rows made since the last step."""
    kept_rows: KeptRows = field(default_factory=KeptRows)
    """Writes the rows that stay in the run directory."""
    callbacks: CallbackRunner | None = None
    """Calls the functions that the caller of the Python API gave; None without any."""


@dataclass(frozen=True)
class TeacherParts:
    """The teachers of a run, by name."""

    pools: Mapping[str, TeacherPool]
    router: TeacherRouter | None
    """None when the run has no teacher and learns from rewards alone."""
    queues: Mapping[str, CallQueue]
    prompts: TeacherPrompts
    """What each teacher reads in place of the student's prompt."""
    aligners: Mapping[str, TokenAligner]
    """Of teachers with another tokenizer."""
    manifests: Callable[[], Mapping[str, Mapping[str, Any]]]
    """Returns the current manifests, which are stored with checkpoints and compared on resume."""
    gate: PublishGate | None = None
    """Rows enter it while they are scored, so that teachers take new weights between two rows only. None: no teacher
    follows the student (`Learner.self_teachers`)."""


@dataclass(frozen=True)
class Producer:
    """What turns prompts into complete rows. Used on the event loop."""

    settings: ProduceSettings
    cursor: PromptCursor | WindowCursor
    renderer: Renderer
    sampling: Sampling
    engine: Engine
    engine_queue: CallQueue
    rollouts: Rollouts
    """Runs the sessions of training steps, here or by remote workers."""
    evaluator: Evaluator
    """Answers held-out prompts with the student's engine."""
    teachers: TeacherParts
    eval_prompts: Sequence[Prompt]
    """Held-out prompts; empty if nothing is evaluated."""
    state: RunState
    publish_gate: PublishGate | None = None
    """Rollouts enter it, so that a publish waits until none is under way. None: a publish does not wait."""


@dataclass(frozen=True)
class Learner:
    """What turns rows into updates of the student. Used on the event loop and on the update's thread."""

    settings: LearnSettings
    policy: Policy | LeadingPolicy
    objective: Objective
    publisher: WeightPublisher
    micro_batches: MicroBatches
    batches: Batches
    """Lays leased rows out for an update: read here, or fetched by each rank."""
    state: RunState
    teacher_heads: Mapping[str, TeacherHead] = field(default_factory=dict)
    """By teacher. Empty unless rows carry hidden states."""
    self_teachers: WeightPublisher | None = None
    """Publishes to the teachers that follow the student; None if there are none."""
    critic: ValueModel | None = None
    """The value model of a run whose advantages need one."""
    reference: ReferenceModel | None = None
    """The frozen model of a run with a KL penalty to a reference."""

    async def publish(self, version: int) -> None:
        """New weights for the engines, then for the teachers that follow the student."""
        await self.publisher.publish(version)
        if self.self_teachers is not None:
            await self.self_teachers.publish(version)


@dataclass(frozen=True)
class System:
    """The parts of one run. Both schedules hold it on the event loop."""

    producer: Producer
    learner: Learner
    state: RunState
