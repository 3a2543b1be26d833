"""The mass outside K candidate ids, and how a divergence accounts for it.

With `bucket` the remaining mass of each side becomes one more outcome, so the divergence is one between two
proper distributions: never negative, zero exactly at equality, and (data processing) never above the
full-vocabulary one. The student's tail is summed over the other V − K logits rather than taken as 1 − Σ, so
it keeps its relative precision down to e⁻⁶⁰ and its gradient is not lost in rounding. The teacher's arrives
as K logprobs, so its tail is log(1 − Σ p) with a floor at float32 resolution.

Shape legend: N tokens, K candidates, M = K or K + 1 outcomes compared.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from understudy.types.scores import NO_CANDIDATE

Tail = Literal["bucket", "renormalise", "drop"]

TEACHER_TAIL_FLOOR = 2.0**-23
"""Smallest teacher tail: below it, 1 − Σp is rounding of float32 logprobs."""

STUDENT_LOG_TAIL_FLOOR = -60.0
"""Smallest log of a student tail: p_tail/q_tail stays far inside float32."""


def log1mexp(x: Tensor) -> Tensor:
    """log(1 − eˣ) for x < 0, accurate at both ends (Mächler 2012)."""
    near_zero = x > -0.6931471805599453
    safe_near = torch.where(near_zero, x, -1.0)
    safe_far = torch.where(near_zero, -1.0, x)
    return torch.where(near_zero, torch.log(-torch.expm1(safe_near)), torch.log1p(-torch.exp(safe_far)))


def teacher_log_tail(logprobs_NK: Tensor) -> Tensor:
    """log of the teacher's mass outside its K candidates [N]; a sum that rounds to 1 or above gives the floor."""
    wide = logprobs_NK if logprobs_NK.dtype == torch.float64 else logprobs_NK.float()
    log_mass = torch.logsumexp(wide, dim=-1)
    return log1mexp(log_mass.clamp_max(math.log1p(-TEACHER_TAIL_FLOOR)))


def floor_log_tail(log_tail_N: Tensor) -> Tensor:
    """A student log-tail with its floor applied to the value only; the gradient passes through unchanged."""
    floored = log_tail_N.clamp_min(STUDENT_LOG_TAIL_FLOOR)
    finite = torch.where(torch.isfinite(log_tail_N), log_tail_N, floored.detach())
    return finite + (floored - finite).detach()


def compared_outcomes(
    teacher_NK: Tensor,
    student_NK: Tensor,
    student_log_tail_N: Tensor | None,
    tail: Tail,
    log_prob_min_clamp: float | None = None,
    no_candidate_NK: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(log p, log q) over the outcomes to compare, [N, M] each.

    `student_log_tail_N` is None if the candidates are the whole vocabulary: then there is no tail. Where
    `no_candidate_NK` (`bucket` only), an entry is no outcome and the student's mass there belongs to the tail.
    """
    teacher_NK = teacher_NK.to(student_NK.dtype)
    if tail == "bucket":
        if student_log_tail_N is None:
            return teacher_NK, student_NK
        if no_candidate_NK is not None:
            outside_NK = torch.where(no_candidate_NK, student_NK, NO_CANDIDATE)
            student_log_tail_N = torch.logaddexp(student_log_tail_N, torch.logsumexp(outside_NK, -1))
            student_NK = torch.where(no_candidate_NK, teacher_NK, student_NK)
        tail_N1 = teacher_log_tail(teacher_NK).to(student_NK.dtype).unsqueeze(-1)
        return torch.cat([teacher_NK, tail_N1], -1), torch.cat(
            [student_NK, student_log_tail_N.unsqueeze(-1)], -1
        )
    if tail == "renormalise":
        return torch.log_softmax(teacher_NK, -1), torch.log_softmax(student_NK, -1)
    if log_prob_min_clamp is not None:
        return teacher_NK.clamp_min(log_prob_min_clamp), student_NK.clamp_min(log_prob_min_clamp)
    return teacher_NK, student_NK
