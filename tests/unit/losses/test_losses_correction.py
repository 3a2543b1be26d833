"""The mismatch between engine and trainer, measured and corrected; and the KL term to a reference."""

from __future__ import annotations

import math

import pytest
import torch

from understudy.errors import LossInputError
from understudy.losses.correction import (
    CorrectionSettings,
    correction_metrics,
    importance_weights,
    mismatch_metrics,
)
from understudy.losses.objective import Objective
from understudy.losses.policy import ClipSettings, policy_loss
from understudy.types.loss import LossInputs, StudentHead, StudentLogits, metric_results

LENGTHS = [3, 1, 2]
DELTA = torch.tensor([0.2, -0.1, 1.5, -2.0, 0.0, 0.3])
"""old − behaviour of each token."""
BEHAVIOUR = torch.tensor([-3.0, -2.0, -4.0, -1.0, -0.5, -2.5])
OLD = BEHAVIOUR + DELTA
SUMS = [1.6, -2.0, 0.3]


def spread(values: list[float]) -> list[float]:
    return [value for value, length in zip(values, LENGTHS, strict=True) for _ in range(length)]


@pytest.mark.parametrize(
    ("level", "log_ratios"),
    [
        ("token", DELTA.tolist()),
        ("sequence", spread(SUMS)),
        ("geometric", spread([total / length for total, length in zip(SUMS, LENGTHS, strict=True)])),
    ],
)
def test_importance_weights_cap_and_drop_ratios_per_token_sequence_or_geometric_mean(
    level: str, log_ratios: list[float]
) -> None:
    ratios = [math.exp(value) for value in log_ratios]
    weighed = importance_weights(OLD, BEHAVIOUR, LENGTHS, CorrectionSettings(weigh=level, cap=1.3))
    assert weighed.tolist() == pytest.approx([min(ratio, 1.3) for ratio in ratios], rel=1e-5)
    dropped = importance_weights(OLD, BEHAVIOUR, LENGTHS, CorrectionSettings(drop=level, low=0.8, high=1.3))
    assert dropped.tolist() == [float(0.8 <= ratio <= 1.3) for ratio in ratios]
    both = CorrectionSettings(weigh="token", cap=1.1, drop=level, low=0.8, high=1.3)
    expected = [
        min(math.exp(own), 1.1) * (0.8 <= ratio <= 1.3)
        for own, ratio in zip(DELTA.tolist(), ratios, strict=True)
    ]
    assert importance_weights(OLD, BEHAVIOUR, LENGTHS, both).tolist() == pytest.approx(expected, rel=1e-5)


def test_equal_logprobs_give_weights_of_one_and_no_mismatch() -> None:
    settings = CorrectionSettings(weigh="sequence", drop="token")
    assert importance_weights(OLD, OLD, LENGTHS, settings).tolist() == [1.0] * 6
    measured = mismatch_metrics(OLD, OLD, LENGTHS)
    assert measured.pop("rollout_corr/ratio_p50") == measured["rollout_corr/ratio_max"] == 1.0
    assert measured["rollout_corr/abs_diff_max"] == measured["rollout_corr/k3_kl"] == 0.0


def test_mismatch_metrics_follow_their_formulas() -> None:
    measured = mismatch_metrics(OLD, BEHAVIOUR, LENGTHS)
    delta = DELTA.tolist()
    assert measured["rollout_corr/kl"] == pytest.approx(-sum(delta) / 6, abs=1e-6)
    assert measured["rollout_corr/k3_kl"] == pytest.approx(
        sum(math.exp(d) - 1 - d for d in delta) / 6, abs=1e-6
    )
    assert measured["rollout_corr/abs_diff_mean"] == pytest.approx(sum(map(abs, delta)) / 6, abs=1e-6)
    assert measured["rollout_corr/abs_diff_max"] == pytest.approx(2.0, abs=1e-6)
    assert measured["rollout_corr/ratio_max"] == pytest.approx(math.exp(1.5), rel=1e-5)
    assert measured["rollout_corr/ratio_p01"] == pytest.approx(math.exp(-2.0), rel=1e-5)
    probabilities = [abs(math.exp(o) - math.exp(b)) for o, b in zip(OLD, BEHAVIOUR, strict=True)]
    assert measured["training/rollout_probs_diff_mean"] == pytest.approx(sum(probabilities) / 6, rel=1e-5)
    assert mismatch_metrics(torch.zeros(0), torch.zeros(0), []) == {}


def test_correction_metrics_report_the_shares_that_were_capped_and_dropped() -> None:
    settings = CorrectionSettings(weigh="token", cap=2.0, drop="sequence", low=0.5, high=10.0)
    weights = importance_weights(OLD, BEHAVIOUR, LENGTHS, settings)
    metrics = correction_metrics(weights, OLD, BEHAVIOUR, LENGTHS, settings)
    assert metrics["rollout_corr/rollout_is_ratio_fraction_high"] == pytest.approx(1 / 6)
    assert metrics["rollout_corr/rollout_is_ratio_fraction_low"] == pytest.approx(1 / 6)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 / 6)
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(1 / 3)
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(
        float(weights.sum()) ** 2 / (6 * float(weights.square().sum())), rel=1e-5
    )


def test_misaligned_or_broken_logprobs_are_refused() -> None:
    with pytest.raises(LossInputError, match="one of each per token"):
        importance_weights(OLD, BEHAVIOUR[:-1], LENGTHS, CorrectionSettings(weigh="token"))
    with pytest.raises(LossInputError, match="not finite"):
        mismatch_metrics(OLD, torch.full_like(OLD, float("nan")), LENGTHS)


def test_the_policy_loss_clips_the_ratio_to_old_and_weighs_by_old_over_behaviour() -> None:
    """The clipped ratio is q / q_old; the engine's own probability enters only as the factor in front."""
    logp = torch.tensor([-1.0, -2.0, -0.3], requires_grad=True)
    old, behaviour = torch.tensor([-1.2, -1.5, -0.3]), torch.tensor([-1.5, -1.0, -0.3])
    advantages = torch.tensor([1.0, -2.0, 0.5])
    weights = importance_weights(old, behaviour, [3], CorrectionSettings(weigh="token", cap=1.25))
    found = policy_loss(logp, advantages, behaviour, old, ClipSettings(0.2, 0.2), weights)
    expected = []
    for q, o, b, a in zip(logp.tolist(), old.tolist(), behaviour.tolist(), advantages.tolist(), strict=True):
        ratio = math.exp(q - o)
        clipped = min(max(ratio, 0.8), 1.2)
        expected.append(min(math.exp(o - b), 1.25) * -min(ratio * a, clipped * a))
    assert found.loss_N.tolist() == pytest.approx(expected, rel=1e-5)
    capped = policy_loss(logp, advantages, behaviour, old, ClipSettings(0.2, 0.2, tis_cap=1.25))
    assert capped.loss_N.tolist() == pytest.approx(expected, rel=1e-5), "tis_cap equals weigh = 'token'"
    with pytest.raises(LossInputError, match="give one of them"):
        policy_loss(logp, advantages, behaviour, old, ClipSettings(tis_cap=2.0), weights)


def task_inputs(count: int, **more: torch.Tensor) -> LossInputs:
    generator = torch.Generator().manual_seed(count)
    return LossInputs(
        token_ids_N=torch.randint(0, 7, (count,), generator=generator),
        weights_N=torch.full((count,), 1 / count),
        behaviour_logprobs_N=-torch.rand(count, generator=generator),
        advantages_N=torch.randn(count, generator=generator),
        **more,
    )


@pytest.mark.parametrize("kind", ["k2", "k3", "k3+", "abs"])
def test_the_reference_kl_term_adds_its_value_and_gradient_on_every_path(kind: str) -> None:
    """Value and gradient of task + kl_coef · estimate, from whole logits, from the fused path, and from the formula."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(5, 4, generator=generator, requires_grad=True)
    weight = torch.randn(7, 4, generator=generator)
    reference = -torch.rand(5, generator=generator) * 3
    inputs = task_inputs(5, reference_logprobs_N=reference, importance_N=torch.rand(5, generator=generator))
    objective = Objective("k2", "sampled", distill_coef=0.0, task_coef=1.0, kl_coef=0.3, kl_kind=kind)
    outputs, gradients = [], []
    for student in (StudentHead(hidden, weight), StudentLogits(hidden @ weight.t())):
        output = objective(student, inputs)
        (gradient,) = torch.autograd.grad(output.loss, hidden)
        outputs.append(output)
        gradients.append(gradient)
    torch.testing.assert_close(outputs[0].loss, outputs[1].loss)
    torch.testing.assert_close(gradients[0], gradients[1])
    logq = (hidden @ weight.t()).log_softmax(-1).gather(1, inputs.token_ids_N[:, None])[:, 0]
    r = logq - reference
    value = {"k2": r**2 / 2, "k3": torch.exp(-r) - 1 + r, "k3+": torch.exp(-r) - 1 + r, "abs": r.abs()}[kind]
    pull = {"k2": r**2 / 2, "k3": torch.exp(-r) - 1 + r, "k3+": r**2 / 2, "abs": r.abs()}[kind]
    task = Objective("k2", "sampled", distill_coef=0.0, task_coef=1.0)(StudentHead(hidden, weight), inputs)
    (task_gradient,) = torch.autograd.grad(task.loss, hidden)
    (pull_gradient,) = torch.autograd.grad(0.3 * pull.mean(), hidden)
    torch.testing.assert_close(outputs[0].loss, task.loss + 0.3 * value.mean().detach())
    torch.testing.assert_close(gradients[0], task_gradient + pull_gradient, atol=1e-6, rtol=1e-5)
    assert metric_results(outputs[0].metrics)["actor/kl_loss"] == pytest.approx(value.mean().item(), rel=1e-5)


def test_k1_to_the_reference_is_refused_as_a_loss() -> None:
    with pytest.raises(LossInputError, match="zero in expectation"):
        Objective("k2", "sampled", kl_coef=0.1, kl_kind="k1")
    with pytest.raises(LossInputError, match="reference_logprobs_N is missing"):
        Objective("k2", "sampled", distill_coef=0.0, task_coef=1.0, kl_coef=0.1)(
            StudentLogits(torch.randn(2, 7)), task_inputs(2)
        )
    assert "k3 to the reference" in Objective("k2", "sampled", kl_coef=0.1).name
