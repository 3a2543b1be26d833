"""What `trainer.mode` asks of the rest of a recipe."""

from __future__ import annotations

from collections.abc import Mapping

from understudy.config.models import TeacherConfig
from understudy.config.rollout import RolloutConfig
from understudy.config.trainer import RunConfig, TrainerConfig

_ASYNC_KEYS = ("max_staleness", "sync_every", "partial_rollouts", "adapt_admission")


def repeats_to_the_bit(trainer: TrainerConfig) -> bool:
    """Whether the schedule alone leaves nothing to timing: which weights write which row."""
    return trainer.mode == "sync" or (trainer.max_staleness == 0 and trainer.sync_every == 1)


def async_problems(
    trainer: TrainerConfig, rollout: RolloutConfig, run: RunConfig, teachers: Mapping[str, TeacherConfig]
) -> list[str]:
    if trainer.mode == "sync":
        defaults = TrainerConfig.model_fields
        return [
            f"trainer.{key} belongs to trainer.mode = 'fully_async'; this recipe has mode = 'sync'"
            for key in _ASYNC_KEYS
            if getattr(trainer, key) != defaults[key].default
        ]
    problems = []
    if run.determinism == "full" and not repeats_to_the_bit(trainer):
        problems.append(
            "run.determinism = 'full' needs rows whose weights do not depend on timing: set trainer.max_staleness = 0 and "
            "trainer.sync_every = 1, or run.determinism = 'fast'"
        )
    if rollout.filter_groups:
        problems.append(
            "rollout.filter_groups takes other prompts where some taught nothing, and the bound on staleness counts prompts: the "
            "two do not go together yet; use trainer.mode = 'sync', or leave rollout.filter_groups off"
        )
    problems += [
        f"teachers.{name}.placement = 'pool': a fully async run keeps its teachers busy all the time, so they share no pool "
        "with the trainer; use 'standalone' or 'external'"
        for name, teacher in teachers.items()
        if teacher.placement == "pool"
    ]
    return problems
