"""Triton kernels for divergences over the whole vocabulary.

A log-probability is (z − peak) − log_total, never z − lse: with logits in the hundreds, one rounded lse would cost four
digits of every probability.

One program handles one row, so nothing is shared between programs and results do not depend on scheduling.

Shape legend: C rows of the chunk, V vocabulary, K candidates.
"""

# mypy: disallow-untyped-defs=False
# Kernel arguments are pointers and scalars of the device language, which Python annotations do not describe.

from __future__ import annotations

import triton
import triton.language as tl

from understudy.losses.fused.kernel_maths import (
    FORWARD_KL,
    HEADROOM,
    MIXTURE,
    NEGATIVE_INFINITY,
    REVERSE_KL,
    divergence_terms,
    transform_slope,
    transformed,
)


@triton.jit
def full_summary_kernel(
    x_ptr, t_ptr, token_ptr, peaks_ptr, log_totals_ptr, logp_ptr, entropy_ptr, loss_ptr, slope_sum_ptr,
    vocab, stride, teacher_stride, shape, scale, softcap, inverse_temperature,
    teacher_scale, teacher_softcap, teacher_inverse_temperature,
    KIND: tl.constexpr, HAS_CAP: tl.constexpr, TEACHER_HAS_CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Numbers per token for a full-vocabulary divergence. KLs and their mixture need one reading of both rows; the others
    need both normalisers first and read the rows a second time, while they are warm in the cache."""
    row = (tl.num_programs(0) - 1 - tl.program_id(0)).to(
        tl.int64
    )  # the GEMM before it wrote the last rows last
    x_base = x_ptr + row * stride
    t_base = t_ptr + row * teacher_stride
    lanes = tl.arange(0, BLOCK)
    token = tl.load(token_ptr + row)
    z_token = transformed(
        tl.load(x_base + token).to(tl.float32), scale, softcap, inverse_temperature, HAS_CAP
    )
    q_peak = z_token
    p_peak = transformed(
        tl.load(t_base + token).to(tl.float32),
        teacher_scale, teacher_softcap, teacher_inverse_temperature, TEACHER_HAS_CAP,
    )  # fmt: skip
    q_sum = tl.zeros([BLOCK], tl.float32)
    p_sum = tl.zeros([BLOCK], tl.float32)
    moment = tl.zeros([BLOCK], tl.float32)
    forward = tl.zeros([BLOCK], tl.float32)
    reverse = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        at = start + lanes
        valid = at < vocab
        x = tl.load(x_base + at, mask=valid, other=NEGATIVE_INFINITY).to(tl.float32)
        y = tl.load(t_base + at, mask=valid, other=NEGATIVE_INFINITY).to(tl.float32)
        z = transformed(x, scale, softcap, inverse_temperature, HAS_CAP)
        t = transformed(y, teacher_scale, teacher_softcap, teacher_inverse_temperature, TEACHER_HAS_CAP)
        top = tl.max(z, 0)
        if top > q_peak + HEADROOM:
            lower = q_peak - top
            factor = tl.exp(lower)
            moment = (moment + q_sum * lower) * factor
            q_sum = q_sum * factor
            reverse = reverse * factor
            q_peak = top
        top = tl.max(t, 0)
        if top > p_peak + HEADROOM:
            factor = tl.exp(p_peak - top)
            p_sum = p_sum * factor
            forward = forward * factor
            p_peak = top
        eq = tl.exp(z - q_peak)
        ep = tl.exp(t - p_peak)
        q_sum += eq
        p_sum += ep
        moment += tl.where(eq > 0.0, eq * (z - q_peak), 0.0)
        if KIND == FORWARD_KL or KIND == MIXTURE:  # noqa: SIM109
            forward += tl.where(ep > 0.0, ep * (t - z), 0.0)
        if KIND == REVERSE_KL or KIND == MIXTURE:  # noqa: SIM109
            reverse += tl.where(eq > 0.0, eq * (z - t), 0.0)
    q_total = tl.sum(q_sum, 0)
    p_total = tl.sum(p_sum, 0)
    log_q_total = tl.log(q_total)
    log_p_total = tl.log(p_total)
    tl.store(peaks_ptr + 2 * row, q_peak)
    tl.store(peaks_ptr + 2 * row + 1, p_peak)
    tl.store(log_totals_ptr + 2 * row, log_q_total)
    tl.store(log_totals_ptr + 2 * row + 1, log_p_total)
    tl.store(logp_ptr + row, z_token - q_peak - log_q_total)
    tl.store(entropy_ptr + row, log_q_total - tl.sum(moment, 0) / q_total)
    lead = (p_peak - q_peak) + (log_p_total - log_q_total)
    forward_kl = tl.sum(forward, 0) / p_total - lead
    reverse_kl = tl.sum(reverse, 0) / q_total + lead
    if KIND == FORWARD_KL:
        loss = forward_kl
        slope_sum = -1.0
    elif KIND == REVERSE_KL:
        loss = reverse_kl
        slope_sum = reverse_kl + 1.0
    elif KIND == MIXTURE:
        loss = shape * forward_kl + (1.0 - shape) * reverse_kl
        slope_sum = (1.0 - shape) * (reverse_kl + 1.0) - shape
    else:
        terms = tl.zeros([BLOCK], tl.float32)
        slopes = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab, BLOCK):
            at = start + lanes
            valid = at < vocab
            x = tl.load(x_base + at, mask=valid, other=NEGATIVE_INFINITY).to(tl.float32)
            y = tl.load(t_base + at, mask=valid, other=NEGATIVE_INFINITY).to(tl.float32)
            z = transformed(x, scale, softcap, inverse_temperature, HAS_CAP)
            t = transformed(y, teacher_scale, teacher_softcap, teacher_inverse_temperature, TEACHER_HAS_CAP)
            term, slope = divergence_terms(t - p_peak - log_p_total, z - q_peak - log_q_total, shape, KIND)
            terms += tl.where(valid, term, 0.0)
            slopes += tl.where(valid, slope, 0.0)
        loss = tl.sum(terms, 0)
        slope_sum = tl.sum(slopes, 0)
    tl.store(loss_ptr + row, loss)
    tl.store(slope_sum_ptr + row, slope_sum)


@triton.jit
def full_gradient_kernel(
    x_ptr, t_ptr, token_ptr, peaks_ptr, log_totals_ptr, slope_sum_ptr, grad_loss_ptr, grad_logp_ptr,
    vocab, stride, teacher_stride, shape, scale, softcap, inverse_temperature,
    teacher_scale, teacher_softcap, teacher_inverse_temperature,
    KIND: tl.constexpr, HAS_CAP: tl.constexpr, TEACHER_HAS_CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x becomes the gradient of the raw logits; one reading of both rows, one writing of the student's."""
    row = tl.program_id(0).to(tl.int64)
    x_base = x_ptr + row * stride
    t_base = t_ptr + row * teacher_stride
    lanes = tl.arange(0, BLOCK)
    token = tl.load(token_ptr + row)
    q_peak = tl.load(peaks_ptr + 2 * row)
    p_peak = tl.load(peaks_ptr + 2 * row + 1)
    log_q_total = tl.load(log_totals_ptr + 2 * row)
    log_p_total = tl.load(log_totals_ptr + 2 * row + 1)
    through = tl.load(grad_loss_ptr + row)
    at_token = tl.load(grad_logp_ptr + row)
    everywhere = through * tl.load(slope_sum_ptr + row) + at_token
    for start in range(0, vocab, BLOCK):
        at = start + lanes
        valid = at < vocab
        x = tl.load(x_base + at, mask=valid, other=NEGATIVE_INFINITY).to(tl.float32)
        y = tl.load(t_base + at, mask=valid, other=NEGATIVE_INFINITY).to(tl.float32)
        z = transformed(x, scale, softcap, inverse_temperature, HAS_CAP)
        t = transformed(y, teacher_scale, teacher_softcap, teacher_inverse_temperature, TEACHER_HAS_CAP)
        _term, slope = divergence_terms(t - p_peak - log_p_total, z - q_peak - log_q_total, shape, KIND)
        d = (
            through * slope
            - everywhere * tl.exp(z - q_peak - log_q_total)
            + tl.where(at == token, at_token, 0.0)
        )
        d = d * transform_slope(z, scale, softcap, inverse_temperature, HAS_CAP)
        tl.store(x_base + at, d.to(x_ptr.dtype.element_ty), mask=valid)
