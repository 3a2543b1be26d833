"""What is refused, with which explanation; and describing an objective without torch."""

from __future__ import annotations

import subprocess
import sys
from typing import get_args

import pytest
import torch
from losses_cases import DIVERGENCES, make_case

from understudy.config.checks.objective import DIVERGENCES as KNOWN_TO_CONFIG
from understudy.config.loss import LossKind
from understudy.errors import LossInputError
from understudy.losses.describe import (
    DIVERGENCE_FORMULAS,
    ESTIMATOR_ALIASES,
    ESTIMATOR_FORMULAS,
    describe_objective,
)
from understudy.losses.objective import Objective
from understudy.losses.reduce import BatchTotals, token_weights
from understudy.types.loss import LossInputs, StudentHead, StudentLogits, TeacherHead


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"kind": "k1", "signal": "sampled"}, "does not depend on the teacher and is zero in expectation"),
        ({"kind": "kl", "signal": "sampled"}, "policy_gradient = true"),
        ({"kind": "forward_kl", "policy_gradient": True}, "zero expected gradient"),
        (
            {"kind": "reverse_kl", "signal": "hidden", "policy_gradient": True},
            "does not depend on the action",
        ),
        ({"kind": "reverse_kl", "signal": "sampled"}, "compares whole distributions"),
        ({"kind": "forward_kl", "signal": "sampled"}, "k3 \\(gradient of forward KL"),
        ({"kind": "forward_kl", "teacher_temperature": 0.7}, "cannot be computed for another temperature"),
        ({"kind": "k2", "signal": "hidden", "teacher_temperature": 0.7}, "needs a divergence"),
        ({"kind": "reverse_kl", "signal": "at_ids", "tail": "drop"}, "choosing other ids"),
        ({"kind": "forward_kl", "tail": "renormalise", "topk": 1}, "identically zero"),
        ({"kind": "forward_kl", "log_prob_min_clamp": -10.0}, "furthest from the teacher"),
        ({"kind": "k2", "signal": "sampled", "discount": 0.5}, "policy_gradient = true"),
        ({"kind": "forward_kl", "discount": 0.5}, "differentiated directly"),
        ({"kind": "forwrad_kl"}, "Did you mean 'forward_kl'"),
        ({"kind": "forward_kl", "signal": "logits"}, "unknown signal 'logits'"),
        ({"kind": "forward_kl", "tail": "keep"}, "unknown tail 'keep'"),
        ({"kind": "jsd", "beta": 1.5}, "beta must lie in"),
        ({"kind": "skew_forward_kl", "alpha": 1.0}, "compares a distribution with itself"),
        ({"kind": "forward_kl", "distill_coef": 0.0}, "one must be above 0"),
        ({"kind": "forward_kl", "per_token_clamp": 0.0}, "per_token_clamp"),
        ({"kind": "k2", "signal": "sampled", "dual_clip": 0.5}, "dual_clip"),
        ({"kind": "k2", "signal": "sampled", "clip_low": 0.0}, "clip_low"),
        ({"kind": "k2", "signal": "sampled", "tis_cap": 0.0}, "tis_cap"),
        ({"kind": "k2", "signal": "sampled", "student_temperature": 0.0}, "temperatures"),
    ],
)
def test_contradictory_objectives_are_refused_with_the_reason(settings: dict, reason: str) -> None:
    with pytest.raises(LossInputError, match=reason):
        describe_objective(**settings)


@pytest.mark.parametrize("kind", [*DIVERGENCES, "k2", "k3", "k3+", "k1+", "abs", "mse", "low_var_kl"])
def test_every_objective_has_a_name_and_a_formula(kind: str) -> None:
    objective = Objective(kind, "topk" if kind in DIVERGENCES else "sampled")
    assert objective.name and objective.formula.startswith("L = Σ_t w_t")
    assert objective.name in str(objective.description)


def test_the_notes_of_a_description_say_what_the_gradient_is() -> None:
    assert "FORWARD" in str(describe_objective("k3", "sampled"))
    assert "below zero" in str(describe_objective("forward_kl", tail="drop"))
    assert "biased" in str(describe_objective("k3", "sampled", policy_gradient=True))
    assert "differ" in str(describe_objective("forward_kl", student_temperature=0.7))
    assert "only log p(y)" in str(describe_objective("k2", "topk"))
    assert "clamped_share" in str(describe_objective("forward_kl", per_token_clamp=10.0))


def test_describing_an_objective_does_not_import_torch() -> None:
    code = (
        "import sys; from understudy.losses.describe import describe_objective as d; "
        "print(d('forward_kl', topk=64)); assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert "top-64" in finished.stdout


def valid_inputs() -> dict:
    return {
        "token_ids_N": torch.tensor([1, 2]),
        "weights_N": torch.ones(2),
        "teacher_ids_NK": torch.tensor([[0, 1], [2, 3]]),
        "teacher_logprobs_NK": torch.tensor([[-0.5, -2.0], [-0.1, -3.0]]),
    }


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"weights_N": torch.ones(3)}, r"weights_N must have shape \[2\].*got float32 \[3\]"),
        ({"token_ids_N": torch.ones(2)}, "token_ids_N must be int64"),
        ({"weights_N": torch.ones(2, dtype=torch.int64)}, "weights_N must be a float tensor"),
        ({"positions_N": torch.zeros(2)}, "positions_N must be int64"),
        ({"weights_N": torch.tensor([1.0, -1.0])}, "negative"),
        ({"teacher_logprobs_NK": None}, "come together"),
        ({"teacher_logprobs_NK": torch.zeros(2, 3)}, r"of shape \[2, 2\]"),
        (
            {
                "teacher_ids_NK": torch.zeros(2, 0, dtype=torch.int64),
                "teacher_logprobs_NK": torch.zeros(2, 0),
            },
            "K = 0",
        ),
        ({"teacher_ids_NK": torch.tensor([[0, -1], [2, 3]])}, "holds -1"),
        (
            {"teacher_logprobs_NK": torch.tensor([[-0.5, float("nan")], [-0.1, -3.0]])},
            r"holds nan at index \[0, 1\]",
        ),
        (
            {"teacher_logprobs_NK": torch.tensor([[-0.5, -2.0], [float("-inf"), -3.0]])},
            r"-inf at index \[1, 0\]",
        ),
        ({"teacher_logprobs_NK": torch.tensor([[-0.1, -0.1], [-0.1, -3.0]])}, "exceeds 1"),
        ({"behaviour_logprobs_N": torch.tensor([0.5, -1.0])}, "at most 0"),
        ({"teacher_logprobs_N": torch.tensor([float("inf"), -1.0])}, "teacher_logprobs_N holds inf"),
        ({"teacher_hidden_NH": torch.zeros(2, 4)}, "come together"),
        (
            {"teacher_hidden_NH": torch.zeros(2, 4), "teacher_head": TeacherHead(torch.zeros(9, 5))},
            r"\[2, 5\]",
        ),
        (
            {
                "teacher_hidden_NH": torch.full((2, 5), float("nan")),
                "teacher_head": TeacherHead(torch.zeros(9, 5)),
            },
            "nan",
        ),
    ],
)
def test_the_error_about_bad_inputs_says_what_came_and_what_was_expected(change: dict, reason: str) -> None:
    with pytest.raises(LossInputError, match=reason) as caught:
        LossInputs(**{**valid_inputs(), **change})
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: StudentHead(torch.zeros(2, 4), torch.zeros(9, 5)), r"\[N, 5\]"),
        (lambda: StudentHead(torch.zeros(2, 5), torch.zeros(9, 5).bfloat16()), "one dtype"),
        (lambda: StudentHead(torch.zeros(2, 5), torch.zeros(9, 5), torch.zeros(8)), "bias_V"),
        (lambda: StudentHead(torch.zeros(2, 5), torch.zeros(9, 5), temperature=0.0), "temperature"),
        (lambda: StudentHead(torch.zeros(2, 5), torch.zeros(9, 5), softcap=-1.0), "softcap"),
        (lambda: StudentHead(torch.zeros(2, 5), torch.zeros(9)), "weight_VH"),
        (lambda: StudentLogits(torch.zeros(9)), "logits_NV"),
        (lambda: token_weights([1, 2], "mean"), "unknown reduction"),
        (lambda: token_weights([1, -2]), "-2"),
        (lambda: token_weights([4, 4], total=BatchTotals(3, 1)), "global batch"),
        (lambda: token_weights(torch.zeros(2)), "integers"),
    ],
)
def test_bad_heads_and_reductions_are_refused(build: object, reason: str) -> None:
    with pytest.raises(LossInputError, match=reason):
        build()


def test_inputs_that_lack_what_the_objective_needs_are_refused() -> None:
    case = make_case(seed=1, dtype=torch.float32)
    student = case.student(torch.float32)
    bare = LossInputs(case.inputs.token_ids_N, case.inputs.weights_N)
    for objective, reason in (
        (Objective("forward_kl"), "teacher_ids_NK"),
        (Objective("forward_kl", "hidden"), "teacher_hidden_NH"),
        (Objective("k2", "sampled"), "teacher_logprobs_N"),
    ):
        with pytest.raises(LossInputError, match=reason):
            objective(student, bare)
    with pytest.raises(LossInputError, match="22 rows"):
        Objective("k2", "sampled")(StudentLogits(torch.zeros(22, 61)), case.inputs)
    with pytest.raises(LossInputError, match="outside the vocabulary of 20"):
        Objective("forward_kl")(StudentLogits(torch.zeros(23, 20)), case.inputs)
    tempered = make_case(seed=1, teacher_temperature=0.7, dtype=torch.float32)
    with pytest.raises(LossInputError, match="temperature"):
        Objective("forward_kl")(tempered.student(torch.float32), tempered.inputs)


def test_config_and_losses_know_the_same_kinds() -> None:
    assert {*get_args(LossKind)} == {*DIVERGENCE_FORMULAS, *ESTIMATOR_FORMULAS, *ESTIMATOR_ALIASES}
    assert {*KNOWN_TO_CONFIG} == DIVERGENCE_FORMULAS.keys()
