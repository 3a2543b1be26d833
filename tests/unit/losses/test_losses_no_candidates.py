"""Tokens with fewer than K candidates, as from a teacher with another tokenizer: every path equals a smaller K."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from losses_cases import DIVERGENCES, Case, gradients, make_case

from understudy.losses.objective import Objective
from understudy.types.loss import LossInputs
from understudy.types.scores import NO_CANDIDATE

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = torch.cuda.is_available() and not INTERPRETED
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
BACKENDS = ["torch", *(["triton"] if INTERPRETED or GPU else [])]
EMPTY, FEWER = 2, 1
"""Tokens of the case: one without candidates, one with three of five."""


def with_gaps(case: Case) -> Case:
    inputs = case.inputs
    assert inputs.teacher_logprobs_NK is not None
    logprobs = inputs.teacher_logprobs_NK.clone()
    logprobs[EMPTY] = NO_CANDIDATE
    logprobs[FEWER, 3:] = NO_CANDIDATE
    return replace(case, inputs=replace(inputs, teacher_logprobs_NK=logprobs))


def one_token(case: Case, token: int, count: int) -> Case:
    """This token alone, with its first `count` candidates and no gaps."""
    rows = case.inputs.rows(token, token + 1)
    assert rows.teacher_ids_NK is not None and rows.teacher_logprobs_NK is not None
    inputs = LossInputs(
        token_ids_N=rows.token_ids_N,
        weights_N=rows.weights_N,
        teacher_ids_NK=rows.teacher_ids_NK[:, :count],
        teacher_logprobs_NK=rows.teacher_logprobs_NK[:, :count],
    )
    return replace(case, hidden=case.hidden[token : token + 1], inputs=inputs)


def on_device(
    case: Case, objective: Objective, dtype: torch.dtype
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    student = case.student(dtype)
    inputs = case.inputs
    if GPU:
        leaves = [
            t.detach().cuda().requires_grad_() for t in (student.hidden_NH, student.weight_VH, student.bias_V)
        ]
        student = type(student)(*leaves, student.softcap, student.logit_scale, student.temperature)
        inputs = replace(inputs, teacher_hidden_NH=None, teacher_head=None).to("cuda")
    output = objective(student, inputs)
    output.loss.backward()
    return output.per_token_N.cpu(), [one.cpu() for one in gradients(student)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", DIVERGENCES)
def test_entries_without_a_candidate_give_the_same_loss_as_a_smaller_k(kind: str, backend: str) -> None:
    """Compared with float64 and a smaller K, token by token; a token without any candidate has no loss and no
    gradient."""
    case = make_case(seed=5, tokens=4)
    gaps = with_gaps(case)
    objective = Objective(kind=kind, signal="topk", backend=backend)
    per_token, found = on_device(gaps, objective, torch.float32)
    plain, plain_gradients = gaps.reference(objective, torch.float32)
    assert torch.allclose(per_token.double(), plain.per_token_N.double(), rtol=1e-5, atol=1e-6)
    for one, expected in zip(found, plain_gradients, strict=True):
        assert torch.allclose(one.double(), expected, rtol=1e-4, atol=1e-6)
    assert per_token[EMPTY] == 0.0 and (found[0][EMPTY] == 0.0).all(), "exactly zero"
    for token, count in ((FEWER, 3), (0, 5), (3, 5)):
        alone = one_token(case, token, count)
        expected, (hidden, *_) = alone.reference(objective, torch.float32)
        assert per_token[token] == pytest.approx(float(expected.per_token_N[0]), rel=1e-5, abs=1e-6)
        assert torch.allclose(found[0][token].double(), hidden[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_student_and_teacher_mass_sum_over_candidates_only(backend: str) -> None:
    gaps = with_gaps(make_case(seed=5, tokens=4))
    objective = Objective(kind="forward_kl", signal="topk", backend=backend)
    student = gaps.student(torch.float32)
    inputs = gaps.inputs
    if GPU:
        pytest.skip("the interpreter shows it")
    columns = objective(student, inputs).columns
    assert columns["student_mass"][EMPTY] == 0.0 == columns["teacher_mass"][EMPTY]
    assert 0 < columns["student_mass"][FEWER] < 1


def test_inputs_without_gaps_have_no_mask_of_missing_candidates() -> None:
    case = make_case(tokens=4)
    assert case.inputs.no_candidate_NK is None and case.inputs.rows(0, 2).no_candidate_NK is None
    found = with_gaps(case).inputs.rows(1, 3).no_candidate_NK
    assert found is not None and found.sum().item() == 2 + 5
