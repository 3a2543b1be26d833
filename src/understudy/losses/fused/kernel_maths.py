"""The formulas of `transform`, `divergences` and `slopes` for Triton, on the values of one block.

All arithmetic is float32, whatever the logits' dtype. Kernels over whole rows use powers of two and the
hardware's approximate exp2 and, for bfloat16 logits, log2 (relative error 2⁻²²): the exact library versions
cost more instructions than the rest of a pass together. Kernels over K candidates use the exact ones.
"""

# mypy: disallow-untyped-defs=False
# Kernel arguments are pointers and scalars of the device language, which Python annotations do not describe.

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

from understudy.types.scores import NO_CANDIDATE
from understudy.types.usable_ids import HIDDEN_LOGIT

FORWARD_KL = tl.constexpr(0)
REVERSE_KL = tl.constexpr(1)
MIXTURE = tl.constexpr(2)
JSD = tl.constexpr(3)
SKEW_FORWARD_KL = tl.constexpr(4)
SKEW_REVERSE_KL = tl.constexpr(5)
TVD = tl.constexpr(6)
KIND_CODES = {
    "forward_kl": 0, "reverse_kl": 1, "mixture": 2, "jsd": 3,
    "skew_forward_kl": 4, "skew_reverse_kl": 5, "tvd": 6, "nothing": 7,
}  # fmt: skip

BUCKET = tl.constexpr(1)
RENORMALISE = tl.constexpr(2)
FLOORED = tl.constexpr(3)
TAIL_CODES = {"drop": 0, "bucket": 1, "renormalise": 2, "floored": 3}

SCALED = tl.constexpr(1)
CAPPED = tl.constexpr(2)
TRANSFORM_CODES = {"identity": 0, "scaled": 1, "capped": 2}

HEADROOM = tl.constexpr(30.0)
"""How far a logit may exceed the reference before a row is rescaled: e³⁰ leaves float32 and bfloat16 ample room."""
HIDDEN = tl.constexpr(HIDDEN_LOGIT)
LEAST_CANDIDATE = tl.constexpr(NO_CANDIDATE / 2)
TEACHER_TAIL_FLOOR = tl.constexpr(2.0**-23)
STUDENT_LOG_TAIL_FLOOR = tl.constexpr(-60.0)
SMALLEST_SHARE = tl.constexpr(1e-10)
"""The row factor is kept at least this share of the largest gradient at an id, so that dividing by it is
safe; the gradient of all remaining ids is then off by at most that share."""
SMALLEST_MIX = tl.constexpr(1e-37)
NEGATIVE_INFINITY = tl.constexpr(float("-inf"))
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

APPROXIMATE = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1" and torch.version.hip is None)
"""Whether the hardware's own exp2 and log2 can be called: not under the interpreter, not on AMD."""


@triton.jit
def block_lanes(BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """0 … BLOCK − 1 as [BLOCK / WIDTH, WIDTH]: with WIDTH = 256 per warp the first axis lies within a
    thread, so that sums over it need no other thread and leave 8 registers per running total instead of
    BLOCK / threads."""
    return tl.arange(0, BLOCK // WIDTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]


@triton.jit
def exp2_fast(x):
    if APPROXIMATE:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.exp2(x)


@triton.jit
def log2_fast(x, PRECISE: tl.constexpr):
    if APPROXIMATE and not PRECISE:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.log2(x)


@triton.jit
def transformed(x, factor, cap, TRANSFORM: tl.constexpr):
    """Raw head output → tempered logit: x, factor·x, or cap·tanh(factor·x); a hidden logit stays hidden."""
    z = x
    if TRANSFORM == SCALED:
        z = x * factor
    if TRANSFORM == CAPPED:
        capped = cap * (1.0 - 2.0 / (tl.exp(x * (2.0 * factor)) + 1.0))
        z = tl.where(x > 0.1 * HIDDEN, capped, HIDDEN)
    return z


@triton.jit
def cap_slope(z, factor, cap):
    """∂z/∂x of a capped logit, as a function of z. (Without a cap the slope is one constant, applied to whole rows.)"""
    inner = z / cap
    return factor * cap * (1.0 - inner * inner)


@triton.jit
def divergence_terms(lp, lq, shape, KIND: tl.constexpr):
    """(φ, q·∂φ/∂q) of each outcome, from log p and log q; outcomes with p = 0 or q = 0 add nothing of their own."""
    p = tl.exp(lp)
    q = tl.exp(lq)
    if KIND == FORWARD_KL:
        term = tl.where(p > 0.0, p * (lp - lq), 0.0)
        slope = -p
    elif KIND == REVERSE_KL:
        term = tl.where(q > 0.0, q * (lq - lp), 0.0)
        slope = term + q
    elif KIND == MIXTURE:
        reverse = tl.where(q > 0.0, q * (lq - lp), 0.0)
        term = shape * tl.where(p > 0.0, p * (lp - lq), 0.0) + (1.0 - shape) * reverse
        slope = (1.0 - shape) * (reverse + q) - shape * p
    elif KIND == TVD:
        term = 0.5 * tl.abs(p - q)
        slope = 0.5 * q * (tl.where(q > p, 1.0, 0.0) - tl.where(q < p, 1.0, 0.0))
    elif KIND == JSD:
        lm = tl.log(shape * p + (1.0 - shape) * q)
        slope = (1.0 - shape) * tl.where(q > 0.0, q * (lq - lm), 0.0)
        term = shape * tl.where(p > 0.0, p * (lp - lm), 0.0) + slope
    elif KIND == SKEW_FORWARD_KL:
        m = shape * p + (1.0 - shape) * q
        term = tl.where(p > 0.0, p * (lp - tl.log(m)), 0.0)
        slope = tl.where(m > 0.0, (shape - 1.0) * p * q / m, 0.0)
    elif KIND == SKEW_REVERSE_KL:
        m = shape * q + (1.0 - shape) * p
        term = tl.where(q > 0.0, q * (lq - tl.log(m)), 0.0)
        slope = tl.where(q > 0.0, term + q - shape * q * q / m, 0.0)
    else:
        term = p * 0.0
        slope = q * 0.0
    return term, slope


@triton.jit
def row_densities(lp2, lq2, shape, KIND: tl.constexpr, PRECISE: tl.constexpr):
    """(q, u, s) of each vocabulary entry, from log2 p and log2 q: u adds up to the divergence and s to the
    slope once multiplied by `row_units`. Hidden entries have p = q = 0 and add 0."""
    p = exp2_fast(lp2)
    q = exp2_fast(lq2)
    u = p
    if KIND == FORWARD_KL:
        s = p
    elif KIND == REVERSE_KL:
        s = q * (lq2 - lp2)
    elif KIND == MIXTURE:
        s = (1.0 - shape) * LN2 * q * (lq2 - lp2) - shape * p
    elif KIND == TVD:
        gap = q - p
        u = tl.abs(gap)
        s = tl.where(gap == 0.0, 0.0, tl.where(gap > 0.0, q, -q))
    elif KIND == JSD:
        lm2 = log2_fast(tl.maximum(shape * p + (1.0 - shape) * q, SMALLEST_MIX), PRECISE)
        s = q * (lq2 - lm2)
        u = p * (lp2 - lm2)
    elif KIND == SKEW_FORWARD_KL:
        m = tl.maximum(shape * p + (1.0 - shape) * q, SMALLEST_MIX)
        u = p * (lp2 - log2_fast(m, PRECISE))
        s = p * q / m
    else:
        m = tl.maximum(shape * q + (1.0 - shape) * p, SMALLEST_MIX)
        u = q * (lq2 - log2_fast(m, PRECISE))
        s = LN2 * u - shape * q * q / m
    return q, u, s


@triton.jit
def row_units(shape, KIND: tl.constexpr):
    """(of u, of s, of s in the divergence): the divergence is unit_u·Σu + also·Σs, its slope unit_s·s."""
    unit_u = shape * 0.0
    unit_s = unit_u + 1.0
    also = unit_u
    if KIND == FORWARD_KL:
        unit_s = unit_u - 1.0
    elif KIND == REVERSE_KL:
        unit_s = unit_u + LN2
    elif KIND == TVD:
        unit_u = unit_u + 0.5
        unit_s = unit_u
    elif KIND == JSD:
        unit_u = shape * LN2
        unit_s = (1.0 - shape) * LN2
        also = unit_s
    elif KIND == SKEW_FORWARD_KL:
        unit_u = unit_u + LN2
        unit_s = shape - 1.0
    elif KIND == SKEW_REVERSE_KL:
        unit_u = unit_u + LN2
    return unit_u, unit_s, also


@triton.jit
def scale_unless_one_kernel(x_ptr, factor_ptr, numel, BLOCK: tl.constexpr):
    """x *= factor; returns at once if the factor is 1, as it is for a plain loss.backward()."""
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor != 1.0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        valid = at < numel
        x = tl.load(x_ptr + at, mask=valid, other=0.0).to(tl.float32)
        tl.store(x_ptr + at, (x * factor).to(x_ptr.dtype.element_ty), mask=valid)


@triton.jit
def scale_rows_kernel(x_ptr, scale_ptr, out_ptr, width, stride, out_stride, BLOCK: tl.constexpr):
    """out = scale of the row · x, rounded once."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + at, mask=at < width, other=0.0).to(tl.float32)
    scaled = x * tl.load(scale_ptr + row)
    tl.store(out_ptr + row * out_stride + at, scaled.to(out_ptr.dtype.element_ty), mask=at < width)
