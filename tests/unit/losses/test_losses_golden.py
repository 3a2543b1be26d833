"""Parity with figures computed by verl 0.9.1 and TRL 1.16.0 on seeded inputs: values and gradients to 1e-5."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from understudy.losses.advantages import gae, grpo, grpo_no_std, rloo, to_tokens
from understudy.losses.describe import canonical_kind
from understudy.losses.estimators import ESTIMATORS, estimate
from understudy.losses.objective import Objective
from understudy.losses.policy import clipped_policy_loss
from understudy.losses.reduce import token_weights
from understudy.types.loss import LossInputs, StudentHead, StudentLogits, TeacherHead, metric_results

GOLDEN = Path(__file__).parents[2] / "golden"
VERL = json.loads((GOLDEN / "verl.json").read_text())["cases"]
TRL = json.loads((GOLDEN / "trl.json").read_text())


def assert_near(found: torch.Tensor, expected: object, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(
        found, torch.as_tensor(expected, dtype=found.dtype), rtol=tolerance, atol=tolerance
    )


def both_students(logits: torch.Tensor, temperature: float = 1.0) -> list[tuple[object, torch.Tensor]]:
    """The same student as whole logits and as hidden states behind an identity head."""
    whole, hidden = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    head = StudentHead(hidden, torch.eye(logits.shape[1]), temperature=temperature)
    return [(StudentLogits(whole, temperature), whole), (head, hidden)]


@pytest.mark.parametrize(
    "run", VERL["forward_kl_topk"]["runs"], ids=lambda run: str(run["log_prob_min_clamp"])
)
def test_forward_kl_on_top_k_without_a_tail_equals_verls(run: dict) -> None:
    case = VERL["forward_kl_topk"]
    logits = torch.tensor(case["student_logits"])
    count = len(logits)
    inputs = LossInputs(
        token_ids_N=torch.zeros(count, dtype=torch.int64),
        weights_N=torch.ones(count),
        teacher_ids_NK=torch.tensor(case["topk_ids"]),
        teacher_logprobs_NK=torch.tensor(case["topk_logprobs"]),
    )
    objective = Objective("forward_kl", tail="drop", log_prob_min_clamp=run["log_prob_min_clamp"])
    for student, leaf in both_students(logits):
        output = objective(student, inputs)
        output.loss.backward()
        assert_near(output.per_token_N, run["loss"])
        assert_near(leaf.grad, run["grad_student_logits"])
        metrics = metric_results(output.metrics)
        assert metrics["actor/distillation/student_mass"] == pytest.approx(
            sum(run["student_mass"]) / count, abs=1e-6
        )
        assert metrics["actor/distillation/teacher_mass"] == pytest.approx(
            sum(run["teacher_mass"]) / count, abs=1e-6
        )


@pytest.mark.parametrize("kind", VERL["estimators"]["runs"])
def test_estimators_equal_verls(kind: str) -> None:
    case = VERL["estimators"]
    student = torch.tensor(case["student_logprob"], requires_grad=True)
    value = estimate(kind, student, torch.tensor(case["teacher_logprob"]))
    value.sum().backward()
    assert_near(value.detach(), case["runs"][kind]["value"])
    assert_near(student.grad, case["runs"][kind]["grad"])


def test_every_estimator_has_a_golden_figure() -> None:
    assert {canonical_kind(kind) for kind in VERL["estimators"]["runs"]} == set(ESTIMATORS)


@pytest.mark.parametrize(("name", "function"), [("grpo", grpo), ("grpo_no_std", grpo_no_std), ("rloo", rloo)])
def test_group_advantages_equal_verls(name: str, function: object) -> None:
    case = VERL["advantages"]
    mask = torch.tensor(case["mask"]).bool()
    rewards = torch.tensor(case["rewards"]).sum(-1)
    advantages = to_tokens(function(rewards, case["groups"]), mask.sum(-1).tolist())
    assert_near(advantages, torch.tensor(case["runs"][name])[mask])


def test_gae_equals_verls() -> None:
    case = VERL["advantages"]
    run = case["runs"]["gae"]
    mask = torch.tensor(case["mask"]).bool()
    advantages, returns = gae(
        torch.tensor(case["rewards"])[mask],
        torch.tensor(run["values"])[mask],
        mask.sum(-1).tolist(),
        run["gamma"],
        run["lam"],
    )
    assert_near(advantages, torch.tensor(run["advantages_whitened"])[mask])
    assert_near(returns, torch.tensor(run["returns"])[mask])


@pytest.mark.parametrize("mode", VERL["agg_loss"]["runs"])
def test_reductions_equal_verls(mode: str) -> None:
    case = VERL["agg_loss"]
    mask = torch.tensor(case["mask"]).bool()
    weights = token_weights(mask.sum(-1), mode)
    assert_near((weights * torch.tensor(case["loss"])[mask]).sum(), case["runs"][mode])


def test_clipped_policy_loss_equals_verls() -> None:
    case = VERL["policy_loss"]
    mask = torch.tensor(case["mask"]).bool()
    logp = torch.tensor(case["new"], requires_grad=True)
    result = clipped_policy_loss(
        logp[mask], torch.tensor(case["old"])[mask], torch.tensor(case["adv"])[mask],
        case["clip_low"], case["clip_high"], case["dual_clip"],
    )  # fmt: skip
    loss = (token_weights(mask.sum(-1), case["agg"]) * result.loss_N).sum()
    loss.backward()
    assert_near(loss.detach(), case["loss"])
    assert_near(logp.grad, case["grad"])


@pytest.mark.parametrize("run", TRL["runs"], ids=lambda run: f"beta{run['beta']}-T{run['temperature']}")
def test_generalised_jsd_equals_trls(run: dict) -> None:
    logits, teacher = torch.tensor(TRL["student_logits"]), torch.tensor(TRL["teacher_logits"])
    count, vocab = logits.shape
    inputs = LossInputs(
        token_ids_N=torch.zeros(count, dtype=torch.int64),
        weights_N=torch.ones(count),
        teacher_hidden_NH=teacher,
        teacher_head=TeacherHead(torch.eye(vocab), temperature=run["temperature"]),
    )
    objective = Objective("jsd", signal="hidden", beta=run["beta"])
    for student, leaf in both_students(logits, run["temperature"]):
        output = objective(student, inputs)
        output.loss.backward()
        assert_near(output.loss.detach(), run["loss_sum"])
        assert_near(leaf.grad, run["grad_student_logits"])
