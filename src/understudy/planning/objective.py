"""The objective of a `[loss]` section: the arguments it is built from, and its name and formula. No torch."""

from __future__ import annotations

from typing import Any

from understudy.config import LossConfig
from understudy.config.rollout import RolloutConfig
from understudy.losses.describe import ObjectiveDescription, describe_objective

_SHARED = (
    "kind", "signal", "tail", "beta", "alpha", "mixture_weight", "policy_gradient", "distill_coef", "task_coef",
    "clip_low", "clip_high", "dual_clip", "tis_cap", "discount", "per_token_clamp", "loss_max_clamp",
    "log_prob_min_clamp", "clamp_at_zero", "kl_kind", "sft_coef",
)  # fmt: skip


def objective_arguments(loss: LossConfig) -> dict[str, Any]:
    """The arguments that `losses.objective.Objective` and `describe_objective` have in common. A KL that is
    subtracted from rewards is no part of the loss."""
    return {name: getattr(loss, name) for name in _SHARED} | {
        "kl_coef": loss.kl_coef if loss.kl_in == "loss" else 0.0
    }


def describe(loss: LossConfig) -> ObjectiveDescription:
    """Name and formula of the objective; raises `LossInputError` if the settings contradict each other."""
    return describe_objective(
        **objective_arguments(loss),
        topk=loss.topk,
        student_temperature=loss.student_temperature,
        teacher_temperature=loss.teacher_temperature,
    )


def sampling_notes(loss: LossConfig, rollout: RolloutConfig) -> list[str]:
    """Whether a policy gradient weighs tokens by another distribution than the one they are drawn from."""
    policy_gradient = loss.task_coef > 0 or (loss.policy_gradient and loss.distill_coef > 0)
    if not policy_gradient or rollout.temperature in (0.0, loss.student_temperature):
        return []
    return [
        f"rollout.temperature = {rollout.temperature:g} and loss.student_temperature = {loss.student_temperature:g} differ: the ratio of "
        "the policy gradient is not 1 on fresh rows, and is clipped where it is far from 1; set both to one value"
    ]
