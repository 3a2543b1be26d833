"""Builds what trains the student from settings: models, policy settings and the objective."""

from __future__ import annotations

from understudy.config import LossConfig
from understudy.losses.objective import Objective
from understudy.planning.objective import objective_arguments
from understudy.planning.resolved import LearnSettings, ModelSource
from understudy.policy.lora import LoraSettings
from understudy.policy.optim.adamw import AdamWSettings
from understudy.policy.optim.schedule import Schedule, ScheduleKind
from understudy.policy.step import PolicySettings
from understudy.trainers.models import LoadedModel, load_model
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
