"""Triton kernels for divergences over the whole vocabulary.

A log-probability is (z − peak) − log_total, never z − lse: with logits in the hundreds, one rounded lse
would cost four digits of every probability. One program handles one row, so nothing is shared between
programs and results do not depend on scheduling.

Shape legend: C rows of the chunk, V vocabulary.
"""

# mypy: disallow-untyped-defs=False
# Kernel arguments are pointers and scalars of the device language, which Python annotations do not describe.

from __future__ import annotations

import triton
import triton.language as tl

from understudy.losses.fused.kernel_maths import (
    CAPPED,
    FORWARD_KL,
    HEADROOM,
    HIDDEN,
    LOG2E,
    MIXTURE,
    REVERSE_KL,
    block_lanes,
    cap_slope,
    exp2_fast,
    row_densities,
    row_units,
    transformed,
)


@triton.jit
def full_summary_kernel(
    x_ptr, t_ptr, token_ptr, peaks_ptr, log_totals_ptr, logp_ptr, entropy_ptr, loss_ptr, slope_sum_ptr,
    vocab, stride, teacher_stride, shape, factor, cap, teacher_factor, teacher_cap,
    KIND: tl.constexpr, TRANSFORM: tl.constexpr, TEACHER_TRANSFORM: tl.constexpr, BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Numbers per token for a full-vocabulary divergence. KLs and their mixture read both rows once; all
    other kinds need both normalisers first and read the rows a second time."""
    # From the last row: the preceding GEMM wrote it last, so it is still in the cache.
    row = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    x_base = x_ptr + row * stride
    t_base = t_ptr + row * teacher_stride
    lanes = block_lanes(BLOCK, WIDTH)
    token = tl.load(token_ptr + row)
    z_token = transformed(tl.load(x_base + token).to(tl.float32), factor, cap, TRANSFORM)
    t_token = transformed(
        tl.load(t_base + token).to(tl.float32), teacher_factor, teacher_cap, TEACHER_TRANSFORM
    )
    q_peak = z_token
    p_peak = t_token
    q_sum = tl.zeros([WIDTH], tl.float32)
    p_sum = tl.zeros([WIDTH], tl.float32)
    moment = tl.zeros([WIDTH], tl.float32)
    forward = tl.zeros([WIDTH], tl.float32)
    reverse = tl.zeros([WIDTH], tl.float32)
    x = tl.load(x_base + lanes, mask=lanes < vocab, other=HIDDEN)
    y = tl.load(t_base + lanes, mask=lanes < vocab, other=HIDDEN)
    for start in range(0, vocab, BLOCK):
        at = start + lanes
        z = transformed(x.to(tl.float32), factor, cap, TRANSFORM)
        t = transformed(y.to(tl.float32), teacher_factor, teacher_cap, TEACHER_TRANSFORM)
        # The next block is prefetched while this one is processed.
        x = tl.load(x_base + at + BLOCK, mask=at + BLOCK < vocab, other=HIDDEN)
        y = tl.load(t_base + at + BLOCK, mask=at + BLOCK < vocab, other=HIDDEN)
        zs = z - q_peak
        ts = t - p_peak
        if tl.max(tl.max(tl.maximum(zs, ts), 0), 0) > HEADROOM:
            lower = -tl.maximum(tl.max(tl.max(zs, 0), 0), 0.0)
            shrink = tl.exp(lower)
            moment = (moment + q_sum * lower) * shrink
            reverse = (reverse + q_sum * lower) * shrink
            forward = forward - p_sum * lower
            q_sum = q_sum * shrink
            q_peak = q_peak - lower
            zs = zs + lower
            lower = -tl.maximum(tl.max(tl.max(ts, 0), 0), 0.0)
            shrink = tl.exp(lower)
            forward = (forward + p_sum * lower) * shrink
            reverse = reverse - q_sum * lower
            p_sum = p_sum * shrink
            p_peak = p_peak - lower
            ts = ts + lower
        eq = exp2_fast(zs * LOG2E)
        ep = exp2_fast(ts * LOG2E)
        q_sum += tl.sum(eq, 0)
        p_sum += tl.sum(ep, 0)
        moment += tl.sum(eq * zs, 0)
        if KIND == FORWARD_KL or KIND == MIXTURE:  # noqa: SIM109
            forward += tl.sum(ep * (ts - zs), 0)
        if KIND == REVERSE_KL or KIND == MIXTURE:  # noqa: SIM109
            reverse += tl.sum(eq * (zs - ts), 0)
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
    forward_kl = tl.sum(forward, 0) / p_total - (log_p_total - log_q_total)
    reverse_kl = tl.sum(reverse, 0) / q_total + (log_p_total - log_q_total)
    if KIND == FORWARD_KL:
        loss = forward_kl
        slope_sum = -1.0
    elif KIND == REVERSE_KL:
        loss = reverse_kl
        slope_sum = reverse_kl
    elif KIND == MIXTURE:
        loss = shape * forward_kl + (1.0 - shape) * reverse_kl
        slope_sum = (1.0 - shape) * reverse_kl - shape
    else:
        us = tl.zeros([WIDTH], tl.float32)
        slopes = tl.zeros([WIDTH], tl.float32)
        at = (
            tl.cdiv(vocab, BLOCK) - 1
        ) * BLOCK + lanes  # backwards: what was read last is still in the cache
        x = tl.load(x_base + at, mask=at < vocab, other=HIDDEN)
        y = tl.load(t_base + at, mask=at < vocab, other=HIDDEN)
        for _start in range(0, vocab, BLOCK):
            z = transformed(x.to(tl.float32), factor, cap, TRANSFORM)
            t = transformed(y.to(tl.float32), teacher_factor, teacher_cap, TEACHER_TRANSFORM)
            at -= BLOCK
            x = tl.load(x_base + at, mask=at >= 0, other=HIDDEN)  # prefetched while this block is processed
            y = tl.load(t_base + at, mask=at >= 0, other=HIDDEN)
            lp2 = (t - p_peak) * LOG2E - log_p_total * LOG2E
            lq2 = (z - q_peak) * LOG2E - log_q_total * LOG2E
            _q, u, s = row_densities(lp2, lq2, shape, KIND, x_ptr.dtype.element_ty == tl.float32)
            us += tl.sum(u, 0)
            slopes += tl.sum(s, 0)
        unit_u, unit_s, also = row_units(shape, KIND)
        loss = unit_u * tl.sum(us, 0) + also * tl.sum(slopes, 0)
        slope_sum = unit_s * tl.sum(slopes, 0)
    tl.store(loss_ptr + row, loss)
    tl.store(slope_sum_ptr + row, slope_sum)


@triton.jit
def full_gradient_kernel(
    x_ptr, t_ptr, token_ptr, peaks_ptr, log_totals_ptr, slope_sum_ptr, grad_loss_ptr, grad_logp_ptr,
    vocab, stride, teacher_stride, shape, factor, cap, teacher_factor, teacher_cap, constant,
    KIND: tl.constexpr, TRANSFORM: tl.constexpr, TEACHER_TRANSFORM: tl.constexpr, HAS_LOGP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Overwrites x with the gradient of the raw logits; reads both rows once, writes the student's once.

    `HAS_LOGP` says whether the loss also depends on log q of the written token (a task term); `constant` is
    the slope of an uncapped transform.
    """
    row = tl.program_id(0).to(tl.int64)
    x_base = x_ptr + row * stride
    t_base = t_ptr + row * teacher_stride
    lanes = tl.arange(0, BLOCK)
    q_peak = tl.load(peaks_ptr + 2 * row)
    p_peak = tl.load(peaks_ptr + 2 * row + 1)
    log2_q_total = tl.load(log_totals_ptr + 2 * row) * LOG2E
    log2_p_total = tl.load(log_totals_ptr + 2 * row + 1) * LOG2E
    through = tl.load(grad_loss_ptr + row) * constant
    at_token = through * 0.0
    token = at_token.to(tl.int64)
    if HAS_LOGP:
        token = tl.load(token_ptr + row)
        at_token = tl.load(grad_logp_ptr + row) * constant
    everywhere = through * tl.load(slope_sum_ptr + row) + at_token
    _unit_u, unit_s, _also = row_units(shape, KIND)
    through = through * unit_s
    x = tl.load(x_base + lanes, mask=lanes < vocab, other=HIDDEN)
    y = tl.load(t_base + lanes, mask=lanes < vocab, other=HIDDEN)
    for start in range(0, vocab, BLOCK):
        at = start + lanes
        z = transformed(x.to(tl.float32), factor, cap, TRANSFORM)
        t = transformed(y.to(tl.float32), teacher_factor, teacher_cap, TEACHER_TRANSFORM)
        # The next block is prefetched while this one is processed.
        x = tl.load(x_base + at + BLOCK, mask=at + BLOCK < vocab, other=HIDDEN)
        y = tl.load(t_base + at + BLOCK, mask=at + BLOCK < vocab, other=HIDDEN)
        lp2 = (t - p_peak) * LOG2E - log2_p_total
        lq2 = (z - q_peak) * LOG2E - log2_q_total
        q, _u, s = row_densities(lp2, lq2, shape, KIND, x_ptr.dtype.element_ty == tl.float32)
        d = through * s - everywhere * q
        if HAS_LOGP:
            d += tl.where(at == token, at_token, 0.0)
        if TRANSFORM == CAPPED:
            d = d * cap_slope(z, factor, cap)
        tl.store(x_base + at, d.to(x_ptr.dtype.element_ty), mask=at < vocab)
