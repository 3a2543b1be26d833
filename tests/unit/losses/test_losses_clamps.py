"""verl's clamps of the distillation term: figures by verl, exact enumeration, every path, what is refused and
printed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from losses_cases import assert_close, gradients, make_case

from understudy.assembly.learner import objective_of
from understudy.config import parse_recipe
from understudy.errors import LossInputError
from understudy.losses.describe import ESTIMATOR_ALIASES, describe_objective
from understudy.losses.objective import Objective
from understudy.losses.reduce import token_weights
from understudy.planning.objective import describe
from understudy.types.loss import LossInputs, StudentHead, StudentLogits, metric_results

FIGURES = json.loads((Path(__file__).parents[2] / "golden" / "verl_clamps.json").read_text())
"""`made_by` in the file says how; `verl` in the names below is 0.9.1."""


def recipe_of(run: dict) -> dict:
    """The `[loss]` table that docs/coming-from-verl.md gives for these keys of verl's."""
    loss: dict = {"loss_max_clamp": run["loss_max_clamp"], "log_prob_min_clamp": run["log_prob_min_clamp"]}
    if run["loss_mode"] == "forward_kl_topk":
        return loss | {"kind": "forward_kl", "signal": "topk", "tail": "drop", "clamp_at_zero": True}
    loss |= {"kind": run["loss_mode"], "signal": "sampled", "policy_gradient": run["use_policy_gradient"]}
    if run["use_policy_gradient"]:
        loss |= {name: FIGURES[name] for name in ("clip_low", "clip_high", "dual_clip")}
    return loss


def inputs_of(figures: dict) -> LossInputs:
    return LossInputs(
        token_ids_N=torch.tensor(figures["tokens"]),
        weights_N=token_weights(figures["lens"], "token-mean"),
        teacher_logprobs_N=torch.tensor(figures["teacher_logprob"]),
        teacher_ids_NK=torch.tensor(figures["topk_ids"]),
        teacher_logprobs_NK=torch.tensor(figures["topk_logprobs"]),
        old_logprobs_N=torch.tensor(figures["old_logprob"]),
    )


def name_of(run: dict) -> str:
    kind = "-pg" if run["use_policy_gradient"] else ""
    return f"{run['loss_mode']}{kind}-{run['log_prob_min_clamp']}-{run['loss_max_clamp']}"


@pytest.mark.parametrize("path", ["plain", "fused"])
@pytest.mark.parametrize("run", FIGURES["runs"], ids=name_of)
def test_a_recipe_with_verls_keys_gives_verls_figures(run: dict, path: str) -> None:
    table = {"student": {"model": "s"}, "teachers": {"t": {"model": "t"}}, "data": {"train": "d.jsonl"}}
    objective = objective_of(parse_recipe({**table, "loss": recipe_of(run)}).loss)
    leaf = torch.tensor(FIGURES["student_logits"], requires_grad=True)
    student = StudentLogits(leaf) if path == "plain" else StudentHead(leaf, torch.eye(leaf.shape[1]))
    output = objective(student, inputs_of(FIGURES))
    output.loss.backward()
    assert output.loss.item() == pytest.approx(run["loss"], rel=1e-5, abs=1e-6)
    torch.testing.assert_close(leaf.grad, torch.tensor(run["grad_student_logits"]), rtol=1e-5, atol=1e-6)


def test_the_figures_cover_a_sum_below_zero_and_clamped_tokens() -> None:
    """Otherwise the figures would be the same without the clamps."""
    inputs, logits = inputs_of(FIGURES), StudentLogits(torch.tensor(FIGURES["student_logits"]))
    free = Objective("forward_kl", tail="drop")(logits, inputs).per_token_N
    clamped = Objective("forward_kl", tail="drop", clamp_at_zero=True)(logits, inputs).per_token_N
    assert int((free < 0).sum()) == 4 and clamped.tolist() == free.clamp_min(0).tolist()
    output = Objective("k1", "sampled", policy_gradient=True, loss_max_clamp=0.5)(logits, inputs)
    assert metric_results(output.metrics)["actor/distillation/clamped_share"] == pytest.approx(5 / 12)


OBJECTIVES = [
    *(
        Objective(kind, tail="drop", log_prob_min_clamp=-2.5, clamp_at_zero=True, chunk_bytes=5_000)
        for kind in ("forward_kl", "reverse_kl", "jsd", "tvd")
    ),
    Objective("forward_kl", loss_max_clamp=0.8, chunk_bytes=5_000),
    Objective("forward_kl", "hidden", loss_max_clamp=0.8, task_coef=0.5, chunk_bytes=5_000),
    Objective("forward_kl", tail="drop", loss_max_clamp=0.2, log_prob_min_clamp=-3.0),
    Objective("k2", "sampled", loss_max_clamp=0.8),
    Objective("k1+", "sampled", loss_max_clamp=0.8),
    Objective("kl", "sampled", policy_gradient=True, loss_max_clamp=0.8),
    Objective("k1", "sampled", policy_gradient=True, loss_max_clamp=0.8, discount=0.9),
]


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda it: f"{it.kind}-{it.signal}-{it.discount}")
def test_the_fused_path_with_clamps_equals_the_fp64_reference(objective: Objective) -> None:
    case = make_case(seed=12, dtype=torch.float32)
    expected, expected_gradients = case.reference(objective, torch.float32)
    student = case.student(torch.float32)
    output = objective(student, case.inputs)
    output.loss.backward()
    assert_close(output.per_token_N, expected.per_token_N, 1e-5)
    for found, wanted in zip(gradients(student), expected_gradients, strict=True):
        assert_close(found, wanted, 1e-5)
    assert metric_results(output.metrics).keys() == metric_results(expected.metrics).keys()


@pytest.mark.parametrize("path", ["plain", "fused"])
def test_the_clamped_policy_gradient_equals_its_enumeration_over_every_token(path: str) -> None:
    """E over y ~ q of ∇[−ρ·A] with A = −clamp(r, ±c): each token's r is clamped before it becomes an advantage."""
    generator = np.random.default_rng(5)
    z, teacher = generator.normal(size=9) * 1.5, generator.normal(size=9) * 1.5
    q, p = np.exp(z) / np.exp(z).sum(), np.exp(teacher) / np.exp(teacher).sum()
    clamped = np.clip(np.log(q / p), -0.6, 0.6)
    assert 0 < int((np.abs(np.log(q / p)) > 0.6).sum()) < 9
    expected = q * clamped - q * np.sum(q * clamped)
    leaf = torch.tensor(np.tile(z, (9, 1)), requires_grad=True)
    inputs = LossInputs(
        token_ids_N=torch.arange(9), weights_N=torch.tensor(q), teacher_logprobs_N=torch.tensor(np.log(p)),
        behaviour_logprobs_N=torch.tensor(np.log(q)),
    )  # fmt: skip
    student = StudentLogits(leaf) if path == "plain" else StudentHead(leaf, torch.eye(9, dtype=torch.float64))
    Objective("kl", "sampled", policy_gradient=True, loss_max_clamp=0.6)(student, inputs).loss.backward()
    np.testing.assert_allclose(leaf.grad.sum(0).numpy(), expected, atol=1e-9)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"kind": "k2", "signal": "sampled", "loss_max_clamp": 0.0}, "loss_max_clamp must be above 0"),
        ({"kind": "forward_kl", "loss_max_clamp": 1.0, "per_token_clamp": 1.0}, "give one of them"),
        ({"kind": "forward_kl", "clamp_at_zero": True}, "tail = 'drop'"),
        ({"kind": "k2", "signal": "topk", "tail": "drop", "clamp_at_zero": True}, "changes nothing"),
        ({"kind": "k2", "signal": "topk", "tail": "drop", "log_prob_min_clamp": -4.0}, "verl's"),
        ({"kind": "forward_kl", "tail": "drop", "log_prob_min_clamp": 0.5}, "must be below 0; got 0.5"),
    ],
)
def test_contradictory_or_invalid_clamps_are_refused(settings: dict, reason: str) -> None:
    with pytest.raises(LossInputError, match=reason):
        describe_objective(**settings)


def test_the_printed_formula_shows_the_clamps() -> None:
    verls = describe_objective(
        "forward_kl", tail="drop", clamp_at_zero=True, loss_max_clamp=10.0, log_prob_min_clamp=-10.0
    )
    assert "[clamp(max(0, Σ p·log(p/q)), ±10)]" in verls.formula
    assert "count as -10" in str(verls) and "clamped_share" in str(verls)
    advantage = describe_objective("kl", "sampled", policy_gradient=True, loss_max_clamp=2.0)
    assert "A = −sg(clamp(r, ±2))" in advantage.formula and "but for clamped tokens" in str(advantage)
    discounted = describe_objective("k1", "sampled", policy_gradient=True, discount=0.5, loss_max_clamp=2.0)
    assert "sg(clamp(r, ±2))_s" in discounted.formula
    table = {"student": {"model": "s"}, "teachers": {"t": {"model": "t"}}, "data": {"train": "d.jsonl"}}
    loss = {"tail": "drop", "clamp_at_zero": True, "loss_max_clamp": 10.0, "log_prob_min_clamp": -10.0}
    assert describe(parse_recipe({**table, "loss": loss}).loss).formula == verls.formula, (
        "the formula that `check` prints"
    )
    assert "[clamp(r²/2, ±2)]" in describe_objective("mse", "sampled", loss_max_clamp=2.0).formula


def test_the_description_of_reverse_kl_without_a_tail_points_to_student_mass() -> None:
    """Three of three students left the teacher's candidates within 15 steps, and the loss did not show it."""
    assert "student_mass" in str(describe_objective("reverse_kl", tail="drop"))
    assert "student_mass" not in str(describe_objective("reverse_kl"))
    assert "student_mass" not in str(describe_objective("forward_kl", tail="drop"))


def test_verls_names_of_estimators_are_accepted_for_kind_and_kl_kind() -> None:
    table = {"student": {"model": "s"}, "teachers": {"t": {"model": "t"}}, "data": {"train": "d.jsonl"}}
    for name, ours in ESTIMATOR_ALIASES.items():
        loss = {"kind": name, "signal": "sampled", "policy_gradient": True}
        assert objective_of(parse_recipe({**table, "loss": loss}).loss).kind == ours
    case = make_case(seed=2, dtype=torch.float32)
    inputs = replace(case.inputs, reference_logprobs_N=case.inputs.teacher_logprobs_N)
    student = case.student(torch.float32)
    values = {
        name: objective_of(
            parse_recipe({**table, "reference": {}, "loss": {"kl_coef": 0.5, "kl_kind": name}}).loss
        )(student, inputs).per_token_N.tolist()
        for name in ("k3", "low_var_kl", "k2", "mse")
    }
    assert values["low_var_kl"] == values["k3"] != values["mse"] == values["k2"]
