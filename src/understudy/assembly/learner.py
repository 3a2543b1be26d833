"""Builds what trains the student from settings: models, policy settings, the objective and its batches."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack

import torch

from understudy.assembly.prepare import Launch
from understudy.assembly.ranks import start_ranks
from understudy.config import LossConfig
from understudy.dataplane.base import DataPlane
from understudy.losses.objective import Objective
from understudy.planning.objective import objective_arguments
from understudy.planning.resolved import LearnSettings, ModelSource, RowFlow
from understudy.policy.lora import LoraSettings
from understudy.policy.optim.adamw import AdamWSettings
from understudy.policy.optim.schedule import Schedule, ScheduleKind
from understudy.policy.policy import Policy
from understudy.policy.ranks.follow import LeadingPolicy
from understudy.policy.step import BadRows, PolicySettings
from understudy.trainers.learn.batches import Batches, LocalBatches
from understudy.trainers.models import LoadedModel, load_model
from understudy.trainers.remote_rows.batches import RemoteBatches
from understudy.trainers.row_columns import fact_columns, token_columns, training_columns
from understudy.types.loss import TeacherHead
from understudy.types.usable_ids import UsableIds


def load_source(source: ModelSource, device: str | None = None) -> LoadedModel:
    """Loads a model on its device, or on `device`."""
    return load_model(
        source.model,
        dtype=source.dtype,
        device=device or source.device,
        trust_remote_code=source.trust_remote_code,
        revision=source.revision,
        attention=source.attention,
    )


def objective_of(loss: LossConfig) -> Objective:
    return Objective(**objective_arguments(loss), backend=loss.backend)


def policy_settings(settings: LearnSettings, usable: UsableIds | None = None) -> PolicySettings:
    trainer = settings.trainer
    return PolicySettings(
        schedule=Schedule(
            ScheduleKind(trainer.schedule), trainer.learning_rate, trainer.steps, trainer.warmup_steps
        ),
        adamw=AdamWSettings(
            weight_decay=trainer.weight_decay,
            grad_clip=trainer.grad_clip,
            offload=trainer.offload_optimizer,
            kind=trainer.optimizer,
        ),
        gradient_checkpointing=settings.student.gradient_checkpointing,
        compile=settings.student.compile,
        loss_temperature=settings.loss.student_temperature,
        lanes=settings.lanes,
        lora=_lora_settings(settings),
        usable=usable,
        freeze_vision=settings.student.freeze_vision,
        ema_decay=trainer.ema_decay,
    )


def _lora_settings(settings: LearnSettings) -> LoraSettings | None:
    """Adapters are initialised from the run's seed, so every rank and every resume starts from the same
    values."""
    lora = settings.student.lora
    if lora is None:
        return None
    return LoraSettings(lora.rank, lora.alpha, tuple(lora.targets), seed=settings.seed)


async def open_policy(
    launch: Launch,
    settings: LearnSettings,
    student: LoadedModel,
    usable: UsableIds | None,
    on_bad_rows: BadRows,
) -> Policy | LeadingPolicy:
    """The student that is trained, in this process or over `trainer.ranks` processes."""
    own, ranks = policy_settings(settings, usable), settings.trainer.ranks
    if ranks == 1:
        return Policy(student.model, own, on_bad_rows=on_bad_rows, pictures=student.pictures)
    return await start_ranks(
        ranks, launch.run, launch.processes, student, own, on_bad_rows, launch.stack, launch.view
    )


async def batches_of(
    settings: LearnSettings,
    flow: RowFlow,
    plane: DataPlane,
    policy: Policy | LeadingPolicy,
    heads: Mapping[str, TeacherHead],
    stack: AsyncExitStack,
    *,
    pictures: bool,
    aligned: tuple[str, ...],
) -> Batches:
    """Lays rows out for updates: read in this process, or fetched by each rank. `pictures`: the student reads them.
    `aligned`: teachers with another tokenizer."""
    loss, scored = settings.loss, settings.scored
    dtype = next((head.weight_VH.dtype for head in heads.values()), torch.bfloat16)
    given = settings.rollout.off_policy > 0
    local = LocalBatches(plane, training_columns(loss, scored, pictures), dtype, given, aligned)
    if not isinstance(policy, LeadingPolicy) or not flow.ranks_fetch:
        return local
    columns = fact_columns(scored), token_columns(loss, scored, pictures)
    remote = await RemoteBatches.open(plane, policy, flow.fetch_seconds, local, *columns)
    stack.callback(remote.close)
    return remote
