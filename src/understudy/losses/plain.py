"""The reference path: whole logits, one log-softmax, autograd. Every fused path must equal it.

Shape legend: N tokens, V vocabulary, K candidates, H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from understudy.losses.divergences import divergence
from understudy.losses.per_token import StudentView, token_losses
from understudy.losses.settings import ObjectiveSettings
from understudy.losses.tails import floor_log_tail
from understudy.types.loss import LossInputs, StudentHead, StudentLogits, TeacherHead


def plain_token_losses(
    objective: ObjectiveSettings, student: StudentLogits, inputs: LossInputs
) -> tuple[Tensor, dict[str, Tensor]]:
    """(Σ weights·l, per-token columns), straight from the definitions."""
    logits_NV = at_least_float32(student.logits_NV) / student.temperature
    logq_NV = torch.log_softmax(logits_NV, -1)
    logp_NK = log_tail_N = divergence_N = None
    if objective.uses_candidates:
        ids_NK = inputs.teacher_ids_NK
        assert ids_NK is not None
        logp_NK = logq_NV.gather(-1, ids_NK)
        if objective.tail == "bucket" and ids_NK.shape[1] < student.vocab_size:
            rest_NV = logq_NV.scatter(-1, ids_NK, float("-inf"))
            log_tail_N = floor_log_tail(torch.logsumexp(rest_NV, -1))
    if objective.uses_full_vocabulary:
        assert inputs.teacher_hidden_NH is not None and inputs.teacher_head is not None
        teacher_NV = head_logits(inputs.teacher_hidden_NH, inputs.teacher_head).detach()
        logp_NV = torch.log_softmax(teacher_NV[:, : student.vocab_size].to(logq_NV.dtype), -1)
        divergence_N = divergence(objective.kind, logp_NV, logq_NV, objective.parameters)
    view = StudentView(
        logp_N=logq_NV.gather(-1, inputs.token_ids_N.unsqueeze(-1)).squeeze(-1),
        logp_NK=logp_NK,
        log_tail_N=log_tail_N,
        divergence_N=divergence_N,
        entropy_N=-(logq_NV.detach().exp() * logq_NV.detach()).sum(-1),
    )
    losses_N, columns = token_losses(objective, view, inputs)
    return (inputs.weights_N.to(losses_N.dtype) * losses_N).sum(), columns


def head_logits(hidden_NH: Tensor, head: StudentHead | TeacherHead) -> Tensor:
    """Tempered logits of a head, in at least float32."""
    logits = at_least_float32(hidden_NH) @ at_least_float32(head.weight_VH).t()
    if head.bias_V is not None:
        logits = logits + at_least_float32(head.bias_V)
    logits = logits * head.logit_scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    return logits / head.temperature


def at_least_float32(tensor: Tensor) -> Tensor:
    """float64 is kept (tests); everything else becomes float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()
