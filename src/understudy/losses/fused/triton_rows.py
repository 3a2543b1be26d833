"""One chunk of logits, read and differentiated by Triton kernels; the protocol of `torch_rows`.

Candidates: ONE pass over the chunk (read, exponentiate, write back). The gradient of a row is c·q everywhere
except at the candidates and the written token, and q = e / total. Both c and total are known only after the
pass, but they are one factor per row, and dᵀ·hidden = eᵀ·(factor·hidden), d·weight = factor·(e·weight). So
the pass writes bare exponentials, a small kernel overwrites the few ids that differ, and the factor is
applied to [C × H] matrices instead of [C × V] ones.

Full vocabulary: one pass over both chunks for the normalisers (two for divergences that need them first),
one that turns the student's logits into their gradient.

Shape legend: C tokens of the chunk, V vocabulary, K candidates.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from understudy.losses.divergences import DIVERGENCES, DivergenceParameters
from understudy.losses.fused.candidate_kernels import (
    candidate_gradient_kernel,
    candidate_loss_kernel,
    exponentiate_rows_kernel,
    take_candidates_kernel,
)
from understudy.losses.fused.full_kernels import full_gradient_kernel, full_summary_kernel
from understudy.losses.fused.kernel_maths import (
    KIND_CODES,
    TAIL_CODES,
    TRANSFORM_CODES,
    scale_rows_kernel,
    scale_unless_one_kernel,
)
from understudy.losses.fused.rows import ViewGradients
from understudy.losses.fused.transform import LogitTransform
from understudy.losses.per_token import StudentView

EXPONENTIATE = {"BLOCK": 1024, "WIDTH": 256, "num_warps": 1}
FULL_SUMMARY = {"BLOCK": 1024, "WIDTH": 256, "num_warps": 1}
FULL_SUMMARY_TWICE = {"BLOCK": 2048, "WIDTH": 2048, "num_warps": 8}
FULL_GRADIENT = {"BLOCK": 8192, "num_warps": 16}
SCALE_BLOCK = 8192
SCALE_ROW_BLOCK = 1024
"""Launch settings, measured on an H200 (benchmarks/losses/losses.py --tune). A summary that reads its rows twice is
faster with few rows in flight, so that the second reading finds part of the first in the cache."""

assert KIND_CODES.keys() == {*DIVERGENCES, "nothing"}

READ_ONCE = {KIND_CODES[kind] for kind in ("forward_kl", "reverse_kl", "mixture")}
"""Divergences whose summary needs no normaliser first."""


class KernelTransform(NamedTuple):
    """A logit transform as the kernels take it: z = x, factor·x or cap·tanh(factor·x)."""

    code: int
    factor: float
    cap: float
    constant: float
    """∂z/∂x if it is one number for the whole row; 1 if there is a cap, whose slope the kernel computes."""


def kernel_transform(transform: LogitTransform) -> KernelTransform:
    if transform.softcap is not None:
        factor, cap = transform.scale / transform.softcap, transform.softcap / transform.temperature
        return KernelTransform(TRANSFORM_CODES["capped"], factor, cap, 1.0)
    constant = transform.scale / transform.temperature
    return KernelTransform(
        TRANSFORM_CODES["identity" if constant == 1.0 else "scaled"], constant, 1.0, constant
    )


def kernel_divergence(kind: str, parameters: DivergenceParameters) -> tuple[int, float]:
    """(code, shape) of a divergence; the ends of a family become the plain KLs, because the general formula
    divides by 0 there."""
    if kind == "jsd":
        ends = {0.0: "forward_kl", 1.0: "reverse_kl"}
        return KIND_CODES[ends.get(parameters.beta, kind)], parameters.beta
    if kind in ("skew_forward_kl", "skew_reverse_kl"):
        plain = kind.removeprefix("skew_")
        return KIND_CODES[plain if parameters.alpha == 0.0 else kind], parameters.alpha
    return KIND_CODES[kind], parameters.mixture_weight


class TritonCandidateRows:
    """Reads the written token and, where given, the divergence over K candidates."""

    def __init__(
        self,
        raw_CV: Tensor,
        transform: LogitTransform,
        token_ids_C: Tensor,
        ids_CK: Tensor | None,
        teacher_CK: Tensor | None,
        kind: str,
        parameters: DivergenceParameters,
        tail: str,
        log_prob_min_clamp: float | None,
        *,
        with_gradient: bool,
    ) -> None:
        rows, vocab = raw_CV.shape
        self._raw_CV, self._token_ids_C = raw_CV, token_ids_C.contiguous()
        self._transform = kernel_transform(transform)
        self._count = 0 if ids_CK is None else ids_CK.shape[1]
        self._has_ids = ids_CK is not None
        self._ids_CK = self._token_ids_C if ids_CK is None else ids_CK.contiguous()
        self._z_CK = _numbers_like(raw_CV, rows, max(self._count, 1))
        self._teacher_CK = self._z_CK if teacher_CK is None else teacher_CK.float().contiguous()
        self._code, self._shape = (
            kernel_divergence(kind, parameters) if self._has_ids else (KIND_CODES["nothing"], 0.0)
        )
        if self._count == vocab and tail == "bucket":
            tail = "drop"
        self._tail = TAIL_CODES[tail if log_prob_min_clamp is None else "floored"]
        self._floor = 0.0 if log_prob_min_clamp is None else log_prob_min_clamp
        self._k_block = max(16, triton.next_power_of_2(max(self._count, 1)))

        z_token_C, reference_C, peak_C, rest_C, moment_C = _numbers_like(raw_CV, 5, rows).unbind(0)
        self._z_token_C, self._peak_C, self._rest_C = z_token_C, peak_C, rest_C
        take_candidates_kernel[(rows,)](
            raw_CV, self._ids_CK, self._teacher_CK, self._token_ids_C, self._z_CK, z_token_C, reference_C,
            raw_CV.stride(0), self._count, self._transform.factor, self._transform.cap,
            TRANSFORM=self._transform.code, HAS_IDS=self._has_ids, K_BLOCK=self._k_block, num_warps=1,
        )  # fmt: skip
        exponentiate_rows_kernel[(rows,)](
            raw_CV, reference_C, peak_C, rest_C, moment_C, vocab, raw_CV.stride(0),
            self._transform.factor, self._transform.cap,
            TRANSFORM=self._transform.code, WRITE=with_gradient, **EXPONENTIATE,
        )  # fmt: skip
        logp_C, entropy_C, loss_C, student_mass_C, teacher_mass_C = _numbers_like(raw_CV, 5, rows).unbind(0)
        candidate_loss_kernel[(rows,)](
            self._z_CK, z_token_C, self._teacher_CK, peak_C, rest_C, moment_C,
            logp_C, entropy_C, loss_C, student_mass_C, teacher_mass_C, self._count, self._shape, self._floor,
            KIND=self._code, TAIL=self._tail, HAS_IDS=self._has_ids, K_BLOCK=self._k_block, num_warps=1,
        )  # fmt: skip
        self.view = StudentView(logp_N=logp_C, entropy_N=entropy_C)
        if self._has_ids:
            self.view = replace(
                self.view,
                divergence_N=loss_C,
                student_mass_N=student_mass_C,
                teacher_mass_N=teacher_mass_C,
            )

    def gradient(self, grads: ViewGradients) -> tuple[Tensor, Tensor]:
        """(d_CV, scale_C): the gradient of the raw logits is scale_C · d_CV."""
        scale_C = torch.empty_like(self._peak_C)
        through_C = grads.logp_N if grads.divergence_N is None else grads.divergence_N
        candidate_gradient_kernel[(len(scale_C),)](
            self._raw_CV, self._ids_CK, self._token_ids_C, self._z_CK, self._z_token_C, self._teacher_CK,
            self._peak_C, self._rest_C, through_C.contiguous(), grads.logp_N.contiguous(), scale_C,
            self._raw_CV.stride(0), self._count, self._shape, self._floor, self._transform.factor, self._transform.cap,
            self._transform.constant,
            KIND=self._code, TAIL=self._tail, HAS_IDS=self._has_ids, TRANSFORM=self._transform.code,
            K_BLOCK=self._k_block, num_warps=1,
        )  # fmt: skip
        return self._raw_CV, scale_C


class TritonFullRows:
    """Reads the written token and a divergence between whole distributions."""

    def __init__(
        self,
        raw_CV: Tensor,
        transform: LogitTransform,
        teacher_CV: Tensor,
        teacher_transform: LogitTransform,
        token_ids_C: Tensor,
        kind: str,
        parameters: DivergenceParameters,
    ) -> None:
        rows, vocab = raw_CV.shape
        self._raw_CV, self._teacher_CV, self._token_ids_C = raw_CV, teacher_CV, token_ids_C.contiguous()
        code, shape = kernel_divergence(kind, parameters)
        student, teacher = kernel_transform(transform), kernel_transform(teacher_transform)
        self._arguments = (
            vocab, raw_CV.stride(0), teacher_CV.stride(0), shape,
            student.factor, student.cap, teacher.factor, teacher.cap,
        )  # fmt: skip
        self._constant = student.constant
        self._codes = {"KIND": code, "TRANSFORM": student.code, "TEACHER_TRANSFORM": teacher.code}
        self._peaks_C2, self._log_totals_C2 = _numbers_like(raw_CV, 2, rows, 2).unbind(0)
        logp_C, entropy_C, loss_C, self._slope_sum_C = _numbers_like(raw_CV, 4, rows).unbind(0)
        full_summary_kernel[(rows,)](
            raw_CV, teacher_CV, self._token_ids_C, self._peaks_C2, self._log_totals_C2, logp_C, entropy_C, loss_C, self._slope_sum_C,
            *self._arguments, **self._codes, **(FULL_SUMMARY if code in READ_ONCE else FULL_SUMMARY_TWICE),
        )  # fmt: skip
        self.view = StudentView(logp_N=logp_C, divergence_N=loss_C, entropy_N=entropy_C)

    def gradient(self, grads: ViewGradients) -> tuple[Tensor, None]:
        """Gradient of the raw logits, written over them."""
        assert grads.divergence_N is not None
        full_gradient_kernel[(self._raw_CV.shape[0],)](
            self._raw_CV, self._teacher_CV, self._token_ids_C, self._peaks_C2, self._log_totals_C2, self._slope_sum_C,
            grads.divergence_N.contiguous(), grads.logp_N.contiguous(),
            *self._arguments, self._constant, **self._codes, HAS_LOGP=grads.has_logp, **FULL_GRADIENT,
        )  # fmt: skip
        return self._raw_CV, None


def scale_unless_one_(gradient: Tensor, factor: Tensor) -> None:
    """gradient *= factor on the device, without a synchronisation to learn whether the factor is 1."""
    blocks = triton.cdiv(gradient.numel(), SCALE_BLOCK)
    if blocks:
        scale_unless_one_kernel[(blocks,)](
            gradient, factor.float(), gradient.numel(), BLOCK=SCALE_BLOCK, num_warps=8
        )


def scaled_rows(x_CH: Tensor, scale_C: Tensor, out_CH: Tensor) -> Tensor:
    """scale_C · x_CH into `out_CH` (which may be x_CH), for matrices whose rows are contiguous."""
    if x_CH.stride(1) != 1:
        x_CH = x_CH.contiguous()
    rows, width = x_CH.shape
    scale_rows_kernel[(rows, triton.cdiv(width, SCALE_ROW_BLOCK))](
        x_CH, scale_C, out_CH, width, x_CH.stride(0), out_CH.stride(0), BLOCK=SCALE_ROW_BLOCK, num_warps=4
    )
    return out_CH


def _numbers_like(raw_CV: Tensor, *shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.float32, device=raw_CV.device)
