"""The cross-entropy of given answers, against its definition, on the plain and the fused path."""

import pytest
import torch

from understudy.losses.objective import Objective
from understudy.types.loss import LossInputs, StudentHead, StudentLogits


@pytest.mark.parametrize("fused", [False, True])
def test_value_and_gradient(fused: bool) -> None:
    torch.manual_seed(0)
    hidden_NH, head_VH = torch.randn(5, 4), torch.randn(7, 4)
    ids_N, given_N = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0])
    teacher_ids_NK = torch.tensor([[0, 1], [2, 3], [3, 4], [4, 5], [5, 6]])
    p_NK = torch.log(torch.full((5, 2), 0.4))
    weights_N = torch.full((5,), 0.2)
    inputs = LossInputs(
        token_ids_N=ids_N,
        weights_N=weights_N,
        teacher_ids_NK=teacher_ids_NK,
        teacher_logprobs_NK=p_NK,
        given_N=given_N,
    )
    found, plain = hidden_NH.clone().requires_grad_(), hidden_NH.clone().requires_grad_()
    student = StudentHead(found, head_VH) if fused else StudentLogits(found @ head_VH.T)
    output = Objective(kind="forward_kl", signal="topk", sft_coef=0.3)(student, inputs)
    output.loss.backward()

    log_q_NV = torch.log_softmax((plain @ head_VH.T).double(), -1)
    log_q_NK = log_q_NV.gather(1, teacher_ids_NK)
    tail_q_N, p = torch.log1p(-log_q_NK.exp().sum(1)), 0.4
    kl_N = (p * (p_NK - log_q_NK)).sum(1) + 0.2 * (torch.log(torch.tensor(0.2)) - tail_q_N)
    cross_N = -log_q_NV.gather(1, ids_N[:, None])[:, 0]
    expected = (weights_N * (kl_N + 0.3 * given_N * cross_N)).sum()
    expected.backward()
    assert float(output.loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-5)
    assert torch.allclose(found.grad, plain.grad.float(), atol=1e-5)
    total = output.metrics["actor/sft_loss"]
    assert float(total.total / total.weight) == pytest.approx(
        float(cross_N[given_N > 0].mean().detach()), abs=1e-5
    )
