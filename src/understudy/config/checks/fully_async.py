"""Checks `trainer.mode` against the rest of a recipe."""

from __future__ import annotations

from collections.abc import Mapping

from understudy.config.models import TeacherConfig
from understudy.config.rollout import RolloutConfig
from understudy.config.trainer import ClusterConfig, RunConfig, TrainerConfig

_ASYNC_KEYS = ("max_staleness", "sync_every", "partial_rollouts", "adapt_admission")


def repeats_to_the_bit(trainer: TrainerConfig) -> bool:
    """Whether the schedule alone decides which weights write which row, independent of timing."""
    return trainer.mode == "sync" or (trainer.max_staleness == 0 and trainer.sync_every == 1)


def async_problems(
    trainer: TrainerConfig,
    rollout: RolloutConfig,
    run: RunConfig,
    teachers: Mapping[str, TeacherConfig],
    cluster: ClusterConfig,
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
    if rollout.filter_groups and trainer.sync_every > 1:
        problems.append(
            "rollout.filter_groups takes other prompts into a window until it is full, and with trainer.sync_every above 1 updates "
            "begin before it is: how many rows each would get is then not known; set trainer.sync_every = 1, or leave "
            "rollout.filter_groups off"
        )
    shared = {pool: role for role, pool in cluster.roles.items()}
    problems += [
        f"teachers.{name}.pool = {teacher.pool!r} is the pool of cluster.roles.{shared[teacher.pool]} too: a fully async run keeps "
        "its teachers busy all the time, so they share no pool with others; give teachers one of their own, or use 'standalone'"
        for name, teacher in teachers.items()
        if teacher.placement == "pool" and teacher.pool in shared
    ]
    return problems
