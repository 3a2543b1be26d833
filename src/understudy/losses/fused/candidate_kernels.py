"""Triton kernels for losses that read the student at the written token and at K candidates.

One program handles one row, so nothing is shared between programs and results do not depend on scheduling.

Shape legend: C rows of the chunk, V vocabulary, K candidates.
"""

# mypy: disallow-untyped-defs=False
# Kernel arguments are pointers and scalars of the device language, which Python annotations do not describe.

from __future__ import annotations

import triton
import triton.language as tl

from understudy.losses.fused.kernel_maths import (
    BUCKET,
    CAPPED,
    FLOORED,
    HEADROOM,
    HIDDEN,
    LEAST_CANDIDATE,
    LOG2E,
    NEGATIVE_INFINITY,
    RENORMALISE,
    SMALLEST_SHARE,
    STUDENT_LOG_TAIL_FLOOR,
    TEACHER_TAIL_FLOOR,
    block_lanes,
    cap_slope,
    divergence_terms,
    exp2_fast,
    transformed,
)


@triton.jit
def candidates_of(teacher_ptr, row, lanes, count):
    """(the teacher's log p, which lanes are candidates) of a row. An entry without a candidate is as if it were not
    there, so its id stays in the row and in the tail."""
    teacher = tl.load(teacher_ptr + row * count + lanes, mask=lanes < count, other=NEGATIVE_INFINITY).to(
        tl.float32
    )
    return teacher, (lanes < count) & (teacher > LEAST_CANDIDATE)


@triton.jit
def take_candidates_kernel(
    x_ptr, ids_ptr, teacher_ptr, token_ptr, z_ids_ptr, z_token_ptr, reference_ptr, stride, count, factor, cap,
    TRANSFORM: tl.constexpr, HAS_IDS: tl.constexpr, K_BLOCK: tl.constexpr,
):  # fmt: skip
    """Gathers the logits at the candidates and at the written token; their maximum is the row's first
    reference.

    The candidates are then hidden in the row, so that its sum is that of all other ids. One warp per
    program: its loads complete before its stores, so a written token that is also a candidate is read in
    time.
    """
    row = tl.program_id(0).to(tl.int64)
    base = x_ptr + row * stride
    token = tl.load(token_ptr + row)
    z_token = transformed(tl.load(base + token).to(tl.float32), factor, cap, TRANSFORM)
    tl.store(z_token_ptr + row, z_token)
    reference = z_token
    if HAS_IDS:
        lanes = tl.arange(0, K_BLOCK)
        _teacher, valid = candidates_of(teacher_ptr, row, lanes, count)
        ids = tl.load(ids_ptr + row * count + lanes, mask=valid, other=0)
        x = tl.load(base + ids, mask=valid, other=HIDDEN).to(tl.float32)
        z = transformed(x, factor, cap, TRANSFORM)
        tl.store(z_ids_ptr + row * count + lanes, z, mask=valid)
        hidden = tl.full([K_BLOCK], HIDDEN, tl.float32)
        tl.store(base + ids, hidden.to(x_ptr.dtype.element_ty), mask=valid)
        reference = tl.maximum(reference, tl.max(z, 0))
    tl.store(reference_ptr + row, reference)


@triton.jit
def exponentiate_rows_kernel(
    x_ptr, reference_ptr, peak_ptr, rest_ptr, moment_ptr, vocab, stride, factor, cap,
    TRANSFORM: tl.constexpr, WRITE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One pass over a row: x becomes exp(z − peak), while Σ exp(z − peak) and Σ exp(z − peak)·(z − peak) add
    up.

    The softmax's denominator is not known yet and not needed: it is a factor of the whole row, applied to
    the row's hidden state instead (see `triton_rows`). The peak only has to be near the maximum; if a block
    exceeds it by too much, the part of the row written so far is rescaled and the row continues with the new
    peak.
    """
    # From the last row: the preceding GEMM wrote it last, so it is still in the cache.
    row = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    base = x_ptr + row * stride
    peak = tl.load(reference_ptr + row)
    rest = tl.zeros([WIDTH], tl.float32)
    moment = tl.zeros([WIDTH], tl.float32)
    lanes = block_lanes(BLOCK, WIDTH)
    ahead = tl.load(base + lanes, mask=lanes < vocab, other=HIDDEN)
    for start in range(0, vocab, BLOCK):
        at = start + lanes
        z = transformed(ahead.to(tl.float32), factor, cap, TRANSFORM)
        # The next block is prefetched while this one is processed.
        ahead = tl.load(base + at + BLOCK, mask=at + BLOCK < vocab, other=HIDDEN)
        shifted = z - peak
        rise = tl.max(tl.max(shifted, 0), 0)
        if rise > HEADROOM:
            shrink = tl.exp(-rise)
            moment = (moment - rest * rise) * shrink
            rest = rest * shrink
            if WRITE:
                for back in range(0, start, BLOCK):
                    written = tl.load(base + back + lanes).to(tl.float32)
                    tl.store(base + back + lanes, (written * shrink).to(x_ptr.dtype.element_ty))
            peak = peak + rise
            shifted = shifted - rise
        e = exp2_fast(shifted * LOG2E)
        rest += tl.sum(e, 0)
        moment += tl.sum(e * shifted, 0)
        if WRITE:
            out = e
            if TRANSFORM == CAPPED:
                out = tl.where(e > 0.0, e * cap_slope(z, factor, cap), 0.0)
            tl.store(base + at, out.to(x_ptr.dtype.element_ty), mask=at < vocab)
    tl.store(peak_ptr + row, peak)
    tl.store(rest_ptr + row, tl.sum(rest, 0))
    tl.store(moment_ptr + row, tl.sum(moment, 0))


@triton.jit
def compared(z, teacher, valid, peak, rest, shape, floor, KIND: tl.constexpr, TAIL: tl.constexpr):
    """Computes one row's candidates: (log q, Σ exp, divergence, ∂D/∂log q per candidate, ∂D/∂log q of the
    tail, q of the tail). `floor` is `log_prob_min_clamp`, read with TAIL = FLOORED (drop, with that clamp)
    only."""
    e = tl.where(valid, tl.exp(z - peak), 0.0)
    total = rest + tl.sum(e, 0)
    lq = z - peak - tl.log(total)
    q_tail = 1.0
    tail_slope = 0.0
    if TAIL == RENORMALISE:
        inside = tl.log(tl.sum(e, 0))
        p_peak = tl.max(tl.where(valid, teacher, NEGATIVE_INFINITY), 0)
        p_inside = p_peak + tl.log(tl.sum(tl.where(valid, tl.exp(teacher - p_peak), 0.0), 0))
        lq_inside = z - peak - inside
        term, slope = divergence_terms(teacher - p_inside, lq_inside, shape, KIND)
        slope = tl.where(valid, slope, 0.0)
        slope = tl.where(valid, slope - tl.exp(lq_inside) * tl.sum(slope, 0), 0.0)
    else:
        lp_held = teacher
        lq_held = lq
        if TAIL == FLOORED:
            lp_held = tl.maximum(teacher, floor)
            lq_held = tl.maximum(lq, floor)
        term, slope = divergence_terms(lp_held, lq_held, shape, KIND)
        slope = tl.where(valid, slope, 0.0)
        if TAIL == FLOORED:
            slope = tl.where(lq < floor, 0.0, slope)
    loss = tl.sum(tl.where(valid, term, 0.0), 0)
    if TAIL == BUCKET:
        p_tail = tl.maximum(1.0 - tl.sum(tl.where(valid, tl.exp(teacher), 0.0), 0), TEACHER_TAIL_FLOOR)
        lq_tail = tl.maximum(-tl.log(1.0 + tl.sum(e, 0) / rest), STUDENT_LOG_TAIL_FLOOR)
        tail_term, tail_slope = divergence_terms(tl.log(p_tail), lq_tail, shape, KIND)
        loss += tail_term
        q_tail = tl.exp(lq_tail)
    return lq, total, loss, slope, tail_slope, q_tail


@triton.jit
def candidate_loss_kernel(
    z_ids_ptr, z_token_ptr, teacher_ptr, peak_ptr, rest_ptr, moment_ptr,
    logp_ptr, entropy_ptr, loss_ptr, student_mass_ptr, teacher_mass_ptr,
    count, shape, floor,
    KIND: tl.constexpr, TAIL: tl.constexpr, HAS_IDS: tl.constexpr, K_BLOCK: tl.constexpr,
):  # fmt: skip
    """Numbers per token: log q of the written token, entropy, divergence over the candidates, masses on them."""
    row = tl.program_id(0).to(tl.int64)
    peak = tl.load(peak_ptr + row)
    total = tl.load(rest_ptr + row)
    moment = tl.load(moment_ptr + row)
    if HAS_IDS:
        lanes = tl.arange(0, K_BLOCK)
        teacher, valid = candidates_of(teacher_ptr, row, lanes, count)
        z = tl.load(z_ids_ptr + row * count + lanes, mask=valid, other=NEGATIVE_INFINITY)
        lq, all_of_it, loss, _slope, _tail_slope, _q_tail = compared(
            z, teacher, valid, peak, total, shape, floor, KIND, TAIL
        )
        total = all_of_it
        e = tl.where(valid, tl.exp(z - peak), 0.0)
        moment += tl.sum(tl.where(e > 0.0, e * (z - peak), 0.0), 0)
        tl.store(loss_ptr + row, loss)
        tl.store(student_mass_ptr + row, tl.sum(tl.where(valid, tl.exp(lq), 0.0), 0))
        tl.store(teacher_mass_ptr + row, tl.sum(tl.where(valid, tl.exp(teacher), 0.0), 0))
    log_total = tl.log(total)
    tl.store(logp_ptr + row, tl.load(z_token_ptr + row) - peak - log_total)
    tl.store(entropy_ptr + row, log_total - moment / total)


@triton.jit
def candidate_gradient_kernel(
    d_ptr, ids_ptr, token_ptr, z_ids_ptr, z_token_ptr, teacher_ptr, peak_ptr, rest_ptr,
    grad_loss_ptr, grad_logp_ptr, row_scale_ptr,
    stride, count, shape, floor, factor, cap, constant,
    KIND: tl.constexpr, TAIL: tl.constexpr, HAS_IDS: tl.constexpr, TRANSFORM: tl.constexpr, K_BLOCK: tl.constexpr,
):  # fmt: skip
    """Finishes the rows that `exponentiate_rows_kernel` left as exp(z − peak).

    With c the coefficient of q at every other id, the gradient of a row is (c / total) · d, where d keeps
    the written exponentials and gets, at the candidates and the token, their own gradient divided by that
    factor. `constant` is the slope of an uncapped transform, a factor of the whole row as well.
    """
    row = tl.program_id(0).to(tl.int64)
    base = d_ptr + row * stride
    peak = tl.load(peak_ptr + row)
    rest = tl.load(rest_ptr + row)
    token = tl.load(token_ptr + row)
    z_token = tl.load(z_token_ptr + row)
    at_token = tl.load(grad_logp_ptr + row)
    everywhere = -at_token
    coefficient = everywhere
    total = rest
    largest = tl.abs(at_token)
    token_is_candidate = 0
    if HAS_IDS:
        through = tl.load(grad_loss_ptr + row)
        lanes = tl.arange(0, K_BLOCK)
        teacher, valid = candidates_of(teacher_ptr, row, lanes, count)
        ids = tl.load(ids_ptr + row * count + lanes, mask=valid, other=-1)
        z = tl.load(z_ids_ptr + row * count + lanes, mask=valid, other=NEGATIVE_INFINITY)
        lq, all_of_it, _loss, slope, tail_slope, q_tail = compared(
            z, teacher, valid, peak, rest, shape, floor, KIND, TAIL
        )
        total = all_of_it
        everywhere -= through * (tl.sum(slope, 0) + tail_slope)
        coefficient = everywhere + through * tail_slope / q_tail
        is_token = ids == token
        at_ids = through * slope + everywhere * tl.exp(lq) + tl.where(is_token, at_token, 0.0)
        at_ids = tl.where(valid, at_ids, 0.0)
        largest = tl.maximum(largest, tl.max(tl.abs(at_ids), 0))
        token_is_candidate = tl.sum(tl.where(is_token, 1, 0), 0)
    smallest = SMALLEST_SHARE * largest
    coefficient = tl.where(tl.abs(coefficient) < smallest, smallest, coefficient)
    row_scale = coefficient / total
    tl.store(row_scale_ptr + row, row_scale * constant)
    divisor = tl.where(row_scale == 0.0, 1.0, row_scale)
    token_value = tl.exp(z_token - peak) + at_token / divisor
    if TRANSFORM == CAPPED:
        token_value = token_value * cap_slope(z_token, factor, cap)
    tl.store(base + token, token_value.to(d_ptr.dtype.element_ty), mask=token_is_candidate == 0)
    if HAS_IDS:
        value = at_ids / divisor
        if TRANSFORM == CAPPED:
            value = value * cap_slope(z, factor, cap)
        tl.store(base + ids, value.to(d_ptr.dtype.element_ty), mask=valid)
