"""Metrics: names, exact merging, and diagnostics that do not affect the gradient."""

from __future__ import annotations

import pytest
import torch
from losses_cases import make_case

from understudy.losses.objective import Objective
from understudy.types.loss import (
    LossInputs,
    MetricMax,
    MetricMin,
    MetricSum,
    MetricTotal,
    StudentLogits,
    merge_metrics,
    metric_results,
    metrics_to_host,
)


def test_merging_keeps_means_of_unequal_parts_exact() -> None:
    parts = [
        {"mean": MetricSum(6.0, 3.0), "sum": MetricTotal(1.5), "low": MetricMin(2.0), "high": MetricMax(2.0)},
        {
            "mean": MetricSum(torch.tensor(1.0), 1.0),
            "sum": MetricTotal(0.5),
            "low": MetricMin(-1.0),
            "high": MetricMax(9.0),
        },
        {"only_here": MetricSum(1.0, 2.0)},
    ]
    found = metric_results(merge_metrics(parts))
    assert found == {"mean": 1.75, "sum": 2.0, "low": -1.0, "high": 9.0, "only_here": 0.5}
    with pytest.raises(TypeError, match="mean"):
        merge_metrics([{"mean": MetricSum(1.0, 1.0)}, {"mean": MetricTotal(1.0)}])


def test_metrics_sent_between_ranks_are_floats_with_the_same_results() -> None:
    output = Objective("forward_kl")(make_case(seed=1).student(torch.float64), make_case(seed=1).inputs)
    sent = metrics_to_host(output.metrics)
    assert metric_results(sent) == metric_results(output.metrics)
    assert all(isinstance(value, float) for metric in sent.values() for value in vars(metric).values())
    assert metric_results({}) == {}


def test_tokens_with_zero_weight_do_not_count_in_metrics() -> None:
    case = make_case(seed=2, dtype=torch.float32)
    weights = case.inputs.weights_N.clone()
    weights[5:] = 0.0
    masked = case.inputs._map(lambda tensor: tensor)
    object.__setattr__(masked, "weights_N", weights)
    part = case.inputs.rows(0, 5)
    student = case.student(torch.float32)
    few = type(student)(student.hidden_NH[:5], student.weight_VH, student.bias_V)
    objective = Objective("forward_kl", task_coef=0.1)
    whole, alone = (
        metric_results(objective(student, masked).metrics),
        metric_results(objective(few, part).metrics),
    )
    assert whole.keys() == alone.keys()
    for name, value in alone.items():
        assert whole[name] == pytest.approx(value, rel=1e-5), name


def test_loss_at_metrics_give_the_divergence_by_position_in_the_response() -> None:
    positions = torch.tensor([0, 15, 16, 300, 5000])
    inputs = LossInputs(
        token_ids_N=torch.zeros(5, dtype=torch.int64),
        weights_N=torch.ones(5),
        positions_N=positions,
        teacher_logprobs_N=torch.log(torch.tensor([0.5, 0.5, 0.25, 0.125, 0.5])),
    )
    output = Objective("abs", "sampled")(StudentLogits(torch.zeros(5, 2)), inputs)
    found = {name: value for name, value in metric_results(output.metrics).items() if "/loss_at/" in name}
    ln2 = 0.6931472
    assert found == pytest.approx(
        {
            "actor/distillation/loss_at/0-15": 0.0,
            "actor/distillation/loss_at/16-63": ln2,
            "actor/distillation/loss_at/256-1023": 2 * ln2,
            "actor/distillation/loss_at/4096+": 0.0,
        },
        abs=1e-6,
    )


def test_metric_names_are_verls_where_verl_has_one() -> None:
    case = make_case(seed=2, dtype=torch.float32)
    output = Objective("forward_kl", task_coef=0.5)(case.student(torch.float32), case.inputs)
    expected = {
        "actor/distillation/loss", "actor/distillation/loss_min", "actor/distillation/loss_max",
        "actor/distillation/student_mass", "actor/distillation/teacher_mass", "actor/entropy", "actor/pg_loss", "actor/pg_clipfrac",
        "actor/pg_clipfrac_lower", "actor/ppo_kl",
    }  # fmt: skip
    assert expected <= output.metrics.keys()


def test_entropy_and_logprobs_are_those_of_the_softmax() -> None:
    case = make_case(seed=2)
    student = case.student(torch.float64, requires_grad=False)
    output = Objective("k2", "sampled")(student, case.inputs)
    log_q = torch.log_softmax(student.hidden_NH @ student.weight_VH.t() + student.bias_V, -1)
    entropy = -(log_q.exp() * log_q).sum(-1)
    assert metric_results(output.metrics)["actor/entropy"] == pytest.approx(entropy.mean().item(), rel=1e-6)
    torch.testing.assert_close(output.logprobs_N, log_q.gather(1, case.inputs.token_ids_N[:, None])[:, 0])
    assert not output.per_token_N.requires_grad and not output.logprobs_N.requires_grad


def test_identical_models_have_zero_divergence_only_at_equal_temperatures() -> None:
    """Dividing only the student's logits by the rollout temperature makes a divergence where there is none."""
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(0)) * 2
    log_p = torch.log_softmax(logits, -1).topk(10)
    inputs = LossInputs(
        torch.zeros(64, dtype=torch.int64), torch.full((64,), 1 / 64),
        teacher_ids_NK=log_p.indices, teacher_logprobs_NK=log_p.values,
    )  # fmt: skip
    same = Objective("forward_kl")(StudentLogits(logits), inputs).loss.item()
    skewed = Objective("forward_kl")(StudentLogits(logits, temperature=0.7), inputs).loss.item()
    assert abs(same) < 1e-6 and skewed > 0.03
