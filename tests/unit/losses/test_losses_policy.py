"""Policy gradients, advantages, the critic's loss and the per-token clamp."""

from __future__ import annotations

import math

import pytest
import torch

from understudy.errors import LossInputError
from understudy.losses.advantages import (
    SEQUENCE_ADVANTAGES,
    discounted_distillation,
    gae,
    reinforce_plus_plus,
    reward_at_end,
    to_tokens,
)
from understudy.losses.objective import Objective
from understudy.losses.policy import ClipSettings, clipped_policy_loss, policy_loss
from understudy.losses.value import value_loss
from understudy.types.loss import LossInputs, StudentLogits, metric_results


def logits_with_logprobs(logprobs: list[float]) -> torch.Tensor:
    """Two-token rows in which token 0 has exactly these log-probabilities."""
    first = torch.tensor(logprobs, dtype=torch.float64)
    return torch.stack([first, torch.log(-torch.expm1(first))], -1)


def opd_inputs(
    student: list[float], teacher: list[float], behaviour: list[float], **more: object
) -> LossInputs:
    count = len(student)
    return LossInputs(
        token_ids_N=torch.zeros(count, dtype=torch.int64),
        weights_N=torch.ones(count),
        teacher_logprobs_N=torch.tensor(teacher),
        behaviour_logprobs_N=torch.tensor(behaviour),
        **more,
    )


def test_advantage_is_minus_k1_and_on_policy_the_ratio_is_one() -> None:
    student, teacher = [-1.0, -2.0], [-0.5, -2.5]
    logits = logits_with_logprobs(student).requires_grad_()
    objective = Objective("k1", "sampled", policy_gradient=True)
    output = objective(StudentLogits(logits), opd_inputs(student, teacher, student))
    output.loss.backward()
    assert output.per_token_N.tolist() == pytest.approx(
        [-0.5, 0.5], abs=1e-6
    )  # −A·1 with A = teacher − student
    q = torch.exp(torch.tensor(student, dtype=torch.float64))
    advantage = torch.tensor([0.5, -0.5], dtype=torch.float64)
    torch.testing.assert_close(logits.grad[:, 0], -advantage * (1 - q), atol=1e-6, rtol=1e-6)


def test_clip_stops_gains_and_dual_clip_bounds_losses() -> None:
    logp = torch.tensor([math.log(2.0), math.log(0.5), math.log(5.0)], requires_grad=True)
    result = clipped_policy_loss(
        logp, torch.zeros(3), torch.tensor([1.0, -1.0, -1.0]), 0.2, 0.28, dual_clip=3.0
    )
    result.loss_N.sum().backward()
    assert result.loss_N.tolist() == pytest.approx([-1.28, 0.8, 3.0])
    assert logp.grad.tolist() == [0.0, 0.0, 0.0]
    assert result.clipped_N.tolist() == [1.0, 1.0, 0.0] and result.clipped_lower_N.tolist() == [0.0, 0.0, 1.0]
    assert result.loss_N[2] < 5.0  # without the dual clip it would be 5


@pytest.mark.parametrize("with_old", [True, False])
def test_tis_cap_bounds_the_importance_weight_but_not_the_clipped_ratio(with_old: bool) -> None:
    logp = torch.tensor([-1.0, -1.0], requires_grad=True)
    old = torch.tensor([-1.0, -1.0]) if with_old else None
    behaviour = torch.tensor([-4.0, -1.5])
    result = policy_loss(logp, torch.tensor([1.0, 1.0]), behaviour, old, ClipSettings(tis_cap=2.0))
    result.loss_N.sum().backward()
    assert result.importance_N.tolist() == pytest.approx([2.0, math.exp(0.5)])
    assert logp.grad.tolist() == pytest.approx([-2.0, -math.exp(0.5)])
    assert result.clipped_N.tolist() == [0.0, 0.0]


def test_the_ratio_is_taken_to_old_logprobs_if_given_and_else_to_behaviour() -> None:
    logp = torch.tensor([0.1], requires_grad=True)
    near = policy_loss(logp, torch.ones(1), torch.tensor([-9.0]), torch.tensor([0.1]), ClipSettings())
    far = policy_loss(logp, torch.ones(1), torch.tensor([-9.0]), None, ClipSettings())
    assert near.log_ratio_N.item() == 0.0 and far.log_ratio_N.item() == pytest.approx(9.1)


def test_missing_logprobs_are_refused_by_name() -> None:
    with pytest.raises(LossInputError, match="behaviour_logprobs_N"):
        policy_loss(torch.zeros(1), torch.ones(1), None, None, ClipSettings())
    with pytest.raises(LossInputError, match="tis_cap"):
        policy_loss(torch.zeros(1), torch.ones(1), None, torch.zeros(1), ClipSettings(tis_cap=2.0))


def test_discounted_distillation_sums_only_later_tokens_of_the_same_sequence() -> None:
    signal = torch.tensor([1.0, 2.0, 4.0, 8.0])
    found = discounted_distillation(signal, torch.tensor([7, 7, 7, 3]), 0.5)
    assert found.tolist() == [-(1 + 1 + 1), -(2 + 2), -4.0, -8.0]
    student, teacher = [-1.0, -1.0, -1.0], [-2.0, -1.0, -3.0]
    inputs = opd_inputs(student, teacher, student, sequence_ids_N=torch.tensor([0, 0, 1]))
    objective = Objective("k1", "sampled", policy_gradient=True, discount=0.5)
    output = objective(StudentLogits(logits_with_logprobs(student)), inputs)
    assert output.per_token_N.tolist() == pytest.approx([1.0, 0.0, 2.0], abs=1e-6)
    with pytest.raises(LossInputError, match="sequence_ids_N"):
        objective(StudentLogits(logits_with_logprobs(student)), opd_inputs(student, teacher, student))


def test_a_discount_needs_no_teacher_logprobs_when_distill_coef_is_zero() -> None:
    objective = Objective("k1", policy_gradient=True, discount=0.5, distill_coef=0.0, task_coef=1.0)
    inputs = LossInputs(
        token_ids_N=torch.zeros(2, dtype=torch.int64),
        weights_N=torch.full((2,), 0.5),
        behaviour_logprobs_N=torch.tensor([-1.0, -1.0]),
        advantages_N=torch.tensor([1.0, -1.0]),
    )
    assert torch.isfinite(objective(StudentLogits(logits_with_logprobs([-1.0, -1.0])), inputs).loss)


def test_per_token_clamp_scales_value_and_gradient_and_is_counted() -> None:
    student, teacher = [-5.0, -1.0], [-0.1, -1.2]
    inputs = opd_inputs(student, teacher, student)
    free, clamped = (logits_with_logprobs(student).requires_grad_() for _ in range(2))
    Objective("k2", "sampled")(StudentLogits(free), inputs).loss.backward()
    output = Objective("k2", "sampled", per_token_clamp=2.0)(StudentLogits(clamped), inputs)
    output.loss.backward()
    value = 4.9**2 / 2
    assert output.per_token_N.tolist() == pytest.approx([2.0, 0.02], abs=1e-5)
    torch.testing.assert_close(clamped.grad[0], free.grad[0] * 2.0 / value, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(clamped.grad[1], free.grad[1])
    assert float(clamped.grad[0].abs().max()) > 0.5  # an ordinary clamp would have made it zero
    assert metric_results(output.metrics)["actor/distillation/clamped_share"] == 0.5


def test_task_and_distillation_terms_add_with_their_coefficients() -> None:
    student, teacher = [-1.0, -2.0], [-0.5, -2.5]
    inputs = opd_inputs(student, teacher, student, advantages_N=torch.tensor([1.0, -3.0]))
    logits = StudentLogits(logits_with_logprobs(student))
    task = Objective("k2", "sampled", distill_coef=0.0, task_coef=1.0)(logits, inputs)
    distill = Objective("k2", "sampled")(logits, inputs)
    both = Objective("k2", "sampled", distill_coef=0.5, task_coef=2.0)(logits, inputs)
    assert both.loss.item() == pytest.approx(0.5 * distill.loss.item() + 2.0 * task.loss.item())
    assert metric_results(task.metrics)["actor/pg_loss"] == pytest.approx(task.loss.item())
    assert "actor/distillation/loss" not in task.metrics
    with pytest.raises(LossInputError, match="advantages_N"):
        Objective("k2", "sampled", task_coef=1.0)(logits, opd_inputs(student, teacher, student))


@pytest.mark.parametrize("name", SEQUENCE_ADVANTAGES)
def test_groups_of_one_or_with_equal_rewards_have_zero_advantage(name: str) -> None:
    rewards = torch.tensor([0.7, 1.0, 1.0, 0.2])
    advantages = SEQUENCE_ADVANTAGES[name](rewards, ["alone", "same", "same", "other"])
    assert advantages.tolist() == [0.0, 0.0, 0.0, 0.0]


def test_a_group_of_one_still_has_a_distillation_gradient() -> None:
    student, teacher = [-1.0], [-0.5]
    advantage = SEQUENCE_ADVANTAGES["grpo"](torch.tensor([1.0]), ["p"])
    inputs = opd_inputs(student, teacher, student, advantages_N=advantage)
    logits = logits_with_logprobs(student).requires_grad_()
    Objective("k2", "sampled", task_coef=1.0)(StudentLogits(logits), inputs).loss.backward()
    assert float(logits.grad.abs().max()) > 0.1


def test_reinforce_plus_plus_whitens_discounted_returns_over_all_tokens() -> None:
    rewards = reward_at_end(torch.tensor([1.0, 0.0, 2.0]), [2, 0, 3])
    assert rewards.tolist() == [0.0, 1.0, 0.0, 0.0, 2.0]
    found = reinforce_plus_plus(rewards, [2, 0, 3], gamma=0.5)
    returns = torch.tensor([0.5, 1.0, 0.5, 1.0, 2.0])
    torch.testing.assert_close(found, (returns - returns.mean()) / returns.std())
    assert reinforce_plus_plus(torch.tensor([1.0]), [1]).tolist() == [0.0]


def test_gae_of_one_sequence_by_hand() -> None:
    _, returns = gae(torch.tensor([0.0, 1.0]), torch.tensor([0.3, 0.6]), [2], gamma=1.0, lam=1.0)
    assert returns.tolist() == pytest.approx([1.0, 1.0])
    with pytest.raises(LossInputError, match="values_N"):
        gae(torch.zeros(2), torch.zeros(3), [2])
    with pytest.raises(LossInputError, match="lengths_B"):
        gae(torch.zeros(2), torch.zeros(2), [3])


def test_bad_rewards_and_group_keys_are_refused() -> None:
    for function in SEQUENCE_ADVANTAGES.values():
        with pytest.raises(LossInputError, match="group keys"):
            function(torch.zeros(2), ["a"])
        with pytest.raises(LossInputError, match="finite"):
            function(torch.tensor([0.0, float("nan")]), ["a", "a"])
    with pytest.raises(LossInputError, match="one each"):
        to_tokens(torch.zeros(2), [1])


def test_value_loss_clips_towards_the_old_value() -> None:
    values = torch.tensor([1.0, 3.0], requires_grad=True)
    result = value_loss(
        values, torch.tensor([0.0, 0.0]), torch.tensor([0.9, 1.0]), torch.tensor([0.5, 0.5]), clip=0.5
    )
    result.loss.backward()
    assert result.per_token_N.tolist() == pytest.approx([0.5, 4.5])
    assert values.grad.tolist() == pytest.approx([0.5, 1.5])
    clipped = value_loss(torch.tensor([0.0]), torch.zeros(1), torch.tensor([1.0]), torch.ones(1), clip=0.5)
    assert clipped.per_token_N.item() == pytest.approx(0.5 * 0.25)
    assert metric_results(clipped.metrics)["critic/vf_clipfrac"] == 1.0
    with pytest.raises(LossInputError, match="returns_N"):
        value_loss(torch.zeros(2), torch.zeros(3), torch.zeros(2), torch.zeros(2))
