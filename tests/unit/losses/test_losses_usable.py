"""Ids left out of the student's softmax: loss and gradients equal those of a head without their rows."""

import os
from dataclasses import replace

import pytest
import torch
from losses_cases import assert_close, gradients, make_case

from understudy.losses.objective import Objective
from understudy.types.loss import LossInputs, StudentHead
from understudy.types.usable_ids import UsableIds

PADDING = 7
KINDS = [
    ("forward_kl", "topk"), ("reverse_kl", "at_ids"), ("k3", "sampled"),
    ("forward_kl", "hidden"), ("reverse_kl", "hidden"), ("jsd", "hidden"), ("skew_forward_kl", "hidden"), ("tvd", "hidden"),
]  # fmt: skip
INTERPRETED = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="run by tests/contract/test_interpreted_kernels.py"
)


def with_rows_in(head: StudentHead, places: torch.Tensor, rows: int) -> StudentHead:
    """The head with its rows at `places` of a larger one, the other rows large enough to matter."""
    hidden = head.hidden_NH.detach()
    weight = torch.randn(rows, hidden.shape[1], dtype=hidden.dtype) * 3
    weight[places] = head.weight_VH.detach()
    bias = None
    if head.bias_V is not None:
        bias = torch.full((rows,), 2.0, dtype=hidden.dtype)
        bias[places] = head.bias_V.detach()
        bias.requires_grad_()
    return replace(
        head, hidden_NH=hidden.clone().requires_grad_(), weight_VH=weight.requires_grad_(), bias_V=bias
    )


def renumbered(inputs: LossInputs, places: torch.Tensor, rows: int) -> LossInputs:
    """The same inputs under the ids that `places` gives."""
    assert inputs.teacher_ids_NK is not None and inputs.teacher_head is not None
    own = inputs.teacher_head.weight_VH[: len(places)]
    weight = torch.randn(rows, own.shape[1], dtype=own.dtype) * 3
    weight[places] = own
    return replace(
        inputs,
        token_ids_N=places[inputs.token_ids_N],
        teacher_ids_NK=places[inputs.teacher_ids_NK],
        teacher_head=replace(inputs.teacher_head, weight_VH=weight),
    )


@pytest.mark.parametrize(("kind", "signal"), KINDS)
@pytest.mark.parametrize(
    ("backend", "holes"),
    [
        pytest.param("torch", (), id="torch-padding"),
        pytest.param("torch", (0, 13, 40), id="torch-padding and holes"),
        pytest.param("triton", (0, 13, 40), id="triton-padding and holes", marks=INTERPRETED),
    ],
)
def test_loss_and_gradients_with_unusable_ids_equal_those_of_a_head_without_their_rows(
    backend: str, kind: str, signal: str, holes: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    case = make_case(dtype=torch.float32, logit_scale=0.7, temperature=1.3, teacher_padding=0)
    objective = Objective(kind=kind, signal=signal, backend=backend)  # type: ignore[arg-type]
    small = case.student(torch.float32)
    count = small.vocab_size
    limit = count + len(holes)
    places = torch.tensor([number for number in range(limit) if number not in holes])
    large = with_rows_in(small, places, limit + PADDING)
    large = replace(large, usable=UsableIds(limit, holes))
    expected_output = Objective(kind=kind, signal=signal, backend="torch")(small, case.inputs)  # type: ignore[arg-type]
    expected_output.loss.backward()
    output = objective(large, renumbered(case.inputs, places, limit + PADDING))
    output.loss.backward()
    torch.testing.assert_close(output.loss, expected_output.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(output.logprobs_N, expected_output.logprobs_N, rtol=1e-5, atol=1e-5)
    hidden, weight, bias = gradients(large)
    for found, expected in zip((hidden, weight[places], bias[places]), gradients(small), strict=True):
        assert_close(found, expected, 2e-5)
    left_out = torch.tensor([*holes, *range(limit, limit + PADDING)])
    assert not weight[left_out].any() and not bias[left_out].any(), "rows of unusable ids get no gradient"
