"""One chunk of logits, read and differentiated with plain torch operations, on any device.

A reader turns raw head outputs into a `StudentView`, then the view's gradients into the gradient of the raw
outputs. It owns its chunk and overwrites it.

Shape legend: C tokens of the chunk, V vocabulary, K candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from understudy.losses.divergences import DivergenceParameters
from understudy.losses.fused.rows import ViewGradients
from understudy.losses.fused.slopes import divergence_and_slope
from understudy.losses.fused.transform import LogitTransform
from understudy.losses.per_token import StudentView
from understudy.losses.plain import at_least_float32
from understudy.losses.tails import STUDENT_LOG_TAIL_FLOOR

HIDDEN_FROM_SOFTMAX = 1e4
"""How far below the row's maximum candidates are pushed while the other ids are summed; e⁻¹⁰⁰⁰⁰ is an exact
0."""


class TorchCandidateRows:
    """Reads the written token and, where given, K candidates and the mass of all other ids.

    Candidates are taken out of the row before it is summed, so the tail is a sum of its own terms and keeps
    its relative precision however small it is.
    """

    def __init__(
        self,
        raw_CV: Tensor,
        transform: LogitTransform,
        token_ids_C: Tensor,
        ids_CK: Tensor | None,
        *,
        tail: bool,
    ) -> None:
        self._dtype = raw_CV.dtype
        self._transform = transform
        self._token_ids_C1 = token_ids_C.unsqueeze(-1)
        self._ids_CK = ids_CK
        z_CV = transform.apply_(at_least_float32(raw_CV))
        peak_C1 = z_CV.amax(-1, keepdim=True)
        z_token_C1 = z_CV.gather(-1, self._token_ids_C1)
        if ids_CK is not None:
            self._z_CK = z_CV.gather(-1, ids_CK)
            z_CV.scatter_(-1, ids_CK, (peak_C1 - HIDDEN_FROM_SOFTMAX).expand_as(ids_CK).contiguous())
        e_CV = torch.sub(z_CV, peak_C1).exp_()
        rest_C = e_CV.sum(-1)
        total_C = rest_C
        moment_C = torch.linalg.vecdot(e_CV, z_CV) - peak_C1.squeeze(-1) * rest_C
        if ids_CK is not None:
            shifted_CK = self._z_CK - peak_C1
            e_CK = shifted_CK.exp()
            total_C = rest_C + e_CK.sum(-1)
            moment_C = moment_C + (e_CK * shifted_CK).sum(-1)
        log_total_C = total_C.log()
        lse_C1 = peak_C1 + log_total_C.unsqueeze(-1)
        self._e_CV, self._total_C = e_CV, total_C
        self._z_CV = z_CV if transform.softcap is not None else None
        self._z_token_C1 = z_token_C1
        log_tail_C = (rest_C.log() - log_total_C).clamp_min(STUDENT_LOG_TAIL_FLOOR) if tail else None
        self.view = StudentView(
            logp_N=(z_token_C1 - lse_C1).squeeze(-1),
            logp_NK=None if ids_CK is None else self._z_CK - lse_C1,
            log_tail_N=log_tail_C,
            entropy_N=log_total_C - moment_C / total_C,
        )

    def gradient(self, grads: ViewGradients) -> tuple[Tensor, None]:
        """Gradient of the raw logits [C, V] in their dtype.

        With G the sum of all gradients of the view: −G·q everywhere, plus the tail's share spread over its
        own ids, plus each id's own gradient at that id.
        """
        everywhere_C = -grads.sum()
        rest_C = everywhere_C
        if grads.log_tail_N is not None:
            assert self.view.log_tail_N is not None
            rest_C = everywhere_C + grads.log_tail_N / self.view.log_tail_N.exp()
        d_CV = self._e_CV.mul_((rest_C / self._total_C).unsqueeze(-1))
        if self._z_CV is not None:
            d_CV.mul_(self._transform.slope(self._z_CV))
        else:
            constant = self._transform.slope(self._z_token_C1)
            if constant != 1.0:
                d_CV.mul_(constant)
        if self._ids_CK is not None:
            assert self.view.logp_NK is not None and grads.logp_NK is not None
            at_ids_CK = grads.logp_NK + everywhere_C.unsqueeze(-1) * self.view.logp_NK.detach().exp()
            d_CV.scatter_(-1, self._ids_CK, at_ids_CK * self._transform.slope(self._z_CK))
        at_token_C1 = grads.logp_N.unsqueeze(-1) * self._transform.slope(self._z_token_C1)
        d_CV.scatter_add_(-1, self._token_ids_C1, at_token_C1)
        return d_CV.to(self._dtype), None


class TorchFullRows:
    """Reads the written token and a divergence between whole distributions."""

    def __init__(
        self,
        raw_CV: Tensor,
        transform: LogitTransform,
        teacher_raw_CV: Tensor,
        teacher_transform: LogitTransform,
        token_ids_C: Tensor,
        kind: str,
        parameters: DivergenceParameters,
    ) -> None:
        self._dtype = raw_CV.dtype
        self._transform = transform
        self._token_ids_C1 = token_ids_C.unsqueeze(-1)
        z_CV = transform.apply_(at_least_float32(raw_CV))
        t_CV = teacher_transform.apply_(at_least_float32(teacher_raw_CV)).to(z_CV.dtype)
        self._z_CV = z_CV if transform.softcap is not None else None
        self._log_q_CV = torch.log_softmax(z_CV, -1)
        log_p_CV = torch.log_softmax(t_CV, -1)
        divergence_C, self._slope_CV = divergence_and_slope(kind, log_p_CV, self._log_q_CV, parameters)
        self.view = StudentView(
            logp_N=self._log_q_CV.gather(-1, self._token_ids_C1).squeeze(-1),
            divergence_N=divergence_C,
            entropy_N=-torch.linalg.vecdot(self._log_q_CV.exp(), self._log_q_CV),
        )

    def gradient(self, grads: ViewGradients) -> tuple[Tensor, None]:
        """Gradient of the raw logits [C, V] in their dtype."""
        assert grads.divergence_N is not None
        through_C = grads.divergence_N * self._slope_CV.sum(-1) + grads.logp_N
        d_CV = self._slope_CV.mul_(grads.divergence_N.unsqueeze(-1))
        d_CV.sub_(self._log_q_CV.exp_().mul_(through_C.unsqueeze(-1)))
        d_CV.scatter_add_(-1, self._token_ids_C1, grads.logp_N.unsqueeze(-1))
        if self._z_CV is not None:
            d_CV.mul_(self._transform.slope(self._z_CV))
        else:
            d_CV.mul_(self._transform.slope(through_C))
        return d_CV.to(self._dtype), None
