"""What a recipe implies, computed once: `Resolved`, one small record per consumer. Imports no torch.

    resolved = resolve(recipe, gpus=0)
    resolved.compute.deterministic     # instead of asking run.determinism, trainer.mode, student.device, …

A question about one section is asked of that section (`recipe.rollout.n`). One that depends on several
sections, or on the machine, is answered here and has a row in tests/unit/planning/test_resolved.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from understudy.config import (
    CriticConfig,
    LossConfig,
    Recipe,
    RolloutConfig,
    StudentConfig,
    TeacherConfig,
    TrainerConfig,
)
from understudy.config.checks.capacity import max_prompts
from understudy.config.checks.fully_async import repeats_to_the_bit
from understudy.planning.cpu_lanes import has_biases, lanes_of
from understudy.planning.seating import ROLLOUT, WORKERS, critic_device, critic_sits_apart
from understudy.planning.windows import Windows


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model to load, and its device."""

    model: str
    """Folder or hub id."""
    dtype: str
    device: str
    """`cpu`, `cuda` or `cuda:N`."""
    trust_remote_code: bool = False
    revision: str | None = None
    attention: str = "auto"


@dataclass(frozen=True, slots=True)
class Compute:
    """How the trainer's process computes."""

    deterministic: bool
    """Batches are composed by key, and torch keeps to algorithms that repeat to the bit."""
    seed: int
    device: str
    """The student's: `cpu`, `cuda` or `cuda:N`."""
    threads: int | None
    """Threads of one operation; None: torch's default."""
    lanes: int
    """Micro-batches that train in parallel, each on one thread (`cpu_lanes.py`)."""
    without_onednn: bool
    """oneDNN is off: it would use more threads than a lane has, for the same bits."""


@dataclass(frozen=True, slots=True)
class CriticSettings:
    """The critic of a run with `loss.advantage = "gae"`."""

    config: CriticConfig
    source: ModelSource
    """On the student's device, if it does not have its own process."""
    own_process: bool
    process_device: str
    """The device of its own process: `auto`, `cpu`, `cuda` or `cuda:N`."""
    process_threads: int | None
    steps: int
    optimizer: Literal["adamw", "adamw_8bit"]
    lanes: int


@dataclass(frozen=True, slots=True)
class ScoredBase:
    """The base of a LoRA student that scores in the engine processes."""

    teachers: Mapping[str, TeacherConfig]
    targets: list[str]
    """The layers with adapters."""
    freeze_vision: bool


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The engine that writes rollouts."""

    rollout: RolloutConfig
    student: ModelSource
    deterministic: bool
    threads: int | None
    """Threads of one operation in an engine process; None: torch's default."""
    shares_tensors: bool
    """No generation runs while the optimizer writes, and the policy holds whole weights: an engine in the
    trainer's process uses the trained tensors, others may read them at any time."""
    adapters_only: bool
    """A publish sends the LoRA adapters alone."""
    candidates: int
    """The student's own best ids per token, for `loss.signal = "at_ids"`."""
    beside_trainer: bool
    """Engines run on the trainer's machine."""
    restarts: int
    scored_base: ScoredBase | None
    """None: engine processes only generate."""


@dataclass(frozen=True, slots=True)
class TeacherSettings:
    """The teachers of a run, and what each must support."""

    teachers: Mapping[str, TeacherConfig]
    signal: str
    k: int
    """The most candidates per token that a teacher scores; 0 if the signal has none."""
    topk: int
    """The best ids per token that a teacher chooses and scores; 0 unless `signal = "topk"`. With `"at_ids"` the
    student chooses."""
    max_new_tokens: int
    temperature: float
    deterministic: bool
    restarts: int
    start_seconds: float
    """How long a server at `urls` may take to answer at the start."""
    default: str | None
    """The teacher of rows whose routing column names none."""

    @property
    def routes(self) -> Mapping[str, str] | None:
        """Value of the routing column → teacher. None: one teacher scores every row."""
        if len(self.teachers) < 2:
            return None
        return {one.key: name for name, one in self.teachers.items() if one.key is not None}


@dataclass(frozen=True, slots=True)
class RowFlow:
    """Which process writes rows, and which reads them."""

    workers_write: bool
    """Workers on other machines write their rows themselves; otherwise the trainer writes every row."""
    ranks_fetch: bool
    """Each rank fetches its rows from TransferQueue; otherwise the trainer sends them."""
    fetch_seconds: float
    """How long such a fetch may take."""
    drop_when_acked: bool
    """A row's columns are deleted with its acknowledgement, because a resume makes them again to the bit;
    otherwise they stay until the next checkpoint."""


@dataclass(frozen=True, slots=True)
class EvalSettings:
    """The evaluation on held-out prompts."""

    k: int
    """Samples per problem beside the greedy answer."""
    solved_at: float
    """The least reward of a solved problem."""
    teachers: Mapping[str, TeacherConfig]
    """Teachers whose accuracy is measured once, as a baseline: those that this run can load."""


@dataclass(frozen=True, slots=True)
class ProduceSettings:
    """How prompts become complete rows."""

    rollout: RolloutConfig
    loss: LossConfig
    scored: bool
    """Teachers score every row; otherwise the run learns from rewards alone."""
    teacher_key: str
    mixture_key: str
    seed: int
    deterministic: bool
    batch_size: int
    """Prompts per step."""
    max_dead_letters: float
    dead_letters_allowed: int
    """That share of all rows of the run, at least one row."""
    dump_every: int
    """Rows of every so-many-th step are written as text; 0: never."""
    keep_rows: int
    """`run.keep_rows`; 0 if rows are in the memory of a cluster and do not pass the trainer."""
    evaluation: EvalSettings


@dataclass(frozen=True, slots=True)
class LearnSettings:
    """How rows become updates of the student."""

    trainer: TrainerConfig
    student: StudentConfig
    loss: LossConfig
    rollout: RolloutConfig
    scored: bool
    """Rows carry scores of a teacher."""
    seed: int
    deterministic: bool
    lanes: int
    windows: Windows
    """The prompts that each publish of a fully async run trains on."""
    teacher_lag: int | None
    """The most publishes that a teacher which follows the student lags behind; None: no teacher follows it."""
    profile_steps: frozenset[int]
    """Steps of which a trace is written."""
    one_update_per_step: bool
    """A step has one update, so the weights before a refused update are those after the step before it."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """The answers for one recipe on one machine. Only what starts a run's parts takes all of them."""

    compute: Compute
    student: ModelSource
    critic: CriticSettings | None
    reference: ModelSource | None
    engine: EngineSettings
    teachers: TeacherSettings
    rows: RowFlow
    produce: ProduceSettings
    learn: LearnSettings

    @property
    def models_beside(self) -> dict[str, str]:
        """Models of critic and reference that are not the student's, by role."""
        beside = {
            "critic": self.critic.source if self.critic is not None else None,
            "reference": self.reference,
        }
        return {
            role: source.model
            for role, source in beside.items()
            if source is not None and source.model != self.student.model
        }


def resolve(recipe: Recipe, gpus: int) -> Resolved:
    """The answers for a machine on which the trainer's process can use `gpus` GPUs."""
    student = _student(recipe, gpus)
    compute = _compute(recipe, student, gpus)
    return Resolved(
        compute=compute,
        student=student,
        critic=_critic(recipe, student, compute),
        reference=_reference(recipe, student),
        engine=_engine(recipe, student, compute),
        teachers=_teachers(recipe, compute),
        rows=_rows(recipe, compute),
        produce=_produce(recipe, compute),
        learn=_learn(recipe, compute),
    )


def _student(recipe: Recipe, gpus: int) -> ModelSource:
    own = recipe.student
    device = own.device if own.device != "auto" else "cuda" if gpus else "cpu"
    return ModelSource(own.model, own.dtype, device, own.trust_remote_code, own.revision, own.attention)


def _compute(recipe: Recipe, student: ModelSource, gpus: int) -> Compute:
    threads = recipe.run.threads
    lanes = lanes_of(
        recipe.student, recipe.critic, recipe.trainer.ranks, threads, on_cpu=student.device == "cpu"
    )
    return Compute(
        deterministic=is_deterministic(recipe, gpus),
        seed=recipe.run.seed,
        device=student.device,
        threads=1 if lanes > 1 else threads,
        lanes=lanes,
        without_onednn=lanes > 1 and student.dtype == "float32" and not has_biases(Path(student.model)),
    )


def is_deterministic(recipe: Recipe, gpus: int) -> bool:
    """Whether the run repeats to the bit: by its own key, otherwise if the schedule does not depend on timing
    and the student trains on a CPU."""
    if recipe.run.determinism is not None:
        return recipe.run.determinism == "full"
    steady = repeats_to_the_bit(recipe.trainer) and recipe.rollout.engine == "hf"
    return steady and _student(recipe, gpus).device == "cpu"


def _critic(recipe: Recipe, student: ModelSource, compute: Compute) -> CriticSettings | None:
    if recipe.loss.advantage != "gae":
        return None
    config = recipe.critic or CriticConfig()
    source = ModelSource(
        config.model or student.model,
        config.dtype,
        student.device,
        student.trust_remote_code,
        student.revision if config.model is None else None,
        config.attention or student.attention,
    )
    return CriticSettings(
        config=config,
        source=source,
        own_process=critic_sits_apart(recipe),
        process_device=critic_device(recipe),
        process_threads=recipe.run.threads,
        steps=recipe.trainer.steps,
        optimizer=recipe.trainer.optimizer,
        lanes=compute.lanes,
    )


def _reference(recipe: Recipe, student: ModelSource) -> ModelSource | None:
    if recipe.loss.kl_coef == 0:
        return None
    config = recipe.reference
    if config is None:
        return student
    own = config.model is not None
    return ModelSource(
        config.model or student.model,
        config.dtype,
        student.device,
        student.trust_remote_code and not own,
        None if own else student.revision,
        config.attention or student.attention,
    )


def workers_write_rows(recipe: Recipe) -> bool:
    """Whether workers write their rows themselves: they run on other machines, and rows go through
    TransferQueue."""
    remote = recipe.cluster.backend == "ray" and WORKERS in recipe.cluster.roles
    return remote and recipe.rollout.workers > 0 and recipe.dataplane.backend == "transfer_queue"


def _engine(recipe: Recipe, student: ModelSource, compute: Compute) -> EngineSettings:
    trainer, loss, lora = recipe.trainer, recipe.loss, recipe.student.lora
    return EngineSettings(
        rollout=recipe.rollout,
        student=student,
        deterministic=compute.deterministic,
        threads=compute.threads,
        shares_tensors=trainer.ranks == 1 and trainer.mode == "sync" and lora is None,
        adapters_only=lora is not None and lora.publish == "adapter",
        candidates=loss.topk if loss.signal == "at_ids" and loss.distill_coef > 0 else 0,
        beside_trainer=recipe.cluster.backend == "local" or ROLLOUT not in recipe.cluster.roles,
        restarts=recipe.cluster.restarts.rollout,
        scored_base=_scored_base(recipe),
    )


def _scored_base(recipe: Recipe) -> ScoredBase | None:
    teachers = {name: one for name, one in recipe.teachers.items() if one.placement == "engine"}
    lora = recipe.student.lora
    if not teachers or lora is None:
        return None
    return ScoredBase(teachers, lora.targets, recipe.student.freeze_vision)


def _teachers(recipe: Recipe, compute: Compute) -> TeacherSettings:
    loss = recipe.loss
    return TeacherSettings(
        teachers=recipe.teachers,
        signal=loss.signal,
        k=loss.topk if loss.signal in ("topk", "at_ids") else 0,
        topk=loss.topk if loss.signal == "topk" else 0,
        max_new_tokens=recipe.rollout.max_new_tokens,
        temperature=loss.teacher_temperature,
        deterministic=compute.deterministic,
        restarts=recipe.cluster.restarts.teacher,
        start_seconds=recipe.cluster.start_timeout_seconds,
        default=recipe.data.default_teacher,
    )


def _rows(recipe: Recipe, compute: Compute) -> RowFlow:
    return RowFlow(
        workers_write=workers_write_rows(recipe),
        ranks_fetch=recipe.trainer.ranks > 1 and recipe.dataplane.backend == "transfer_queue",
        fetch_seconds=recipe.dataplane.queue_timeout_seconds,
        drop_when_acked=compute.deterministic,
    )


def _produce(recipe: Recipe, compute: Compute) -> ProduceSettings:
    trainer, rollout = recipe.trainer, recipe.rollout
    rows = trainer.steps * trainer.batch_size * rollout.n
    others = {name: one for name, one in recipe.teachers.items() if one.version is None}
    # Measured in the trainer's process, which a teacher behind vLLM may not fit.
    measured = {
        name: one for name, one in others.items() if one.placement != "external" and not one.starts_vllm
    }
    return ProduceSettings(
        rollout=rollout,
        loss=recipe.loss,
        scored=bool(recipe.teachers),
        teacher_key=recipe.data.teacher_key,
        mixture_key=recipe.data.mixture_key,
        seed=compute.seed,
        deterministic=compute.deterministic,
        batch_size=trainer.batch_size,
        max_dead_letters=trainer.max_dead_letters,
        dead_letters_allowed=max(math.floor(trainer.max_dead_letters * rows + 1e-9), 1),
        dump_every=recipe.run.rollout_dump_every,
        keep_rows=recipe.run.keep_rows if recipe.dataplane.backend == "embedded" else 0,
        evaluation=EvalSettings(trainer.eval_k, trainer.solved_at, measured if trainer.eval_teachers else {}),
    )


def _learn(recipe: Recipe, compute: Compute) -> LearnSettings:
    trainer = recipe.trainer
    whole = trainer.mini_batch_size is None or trainer.mini_batch_size >= trainer.batch_size
    return LearnSettings(
        trainer=trainer,
        student=recipe.student,
        loss=recipe.loss,
        rollout=recipe.rollout,
        scored=bool(recipe.teachers),
        seed=compute.seed,
        deterministic=compute.deterministic,
        lanes=compute.lanes,
        windows=Windows(
            trainer.batch_size,
            trainer.sync_every,
            trainer.max_staleness,
            trainer.steps,
            max_prompts(recipe.rollout, recipe.dataplane),
        ),
        teacher_lag=max(
            (
                one.version if isinstance(one.version, int) else 0
                for one in recipe.teachers.values()
                if one.follows_student
            ),
            default=None,
        ),
        profile_steps=frozenset(recipe.run.profile_steps),
        one_update_per_step=whole and trainer.epochs == 1 and recipe.loss.advantage != "gae",
    )
