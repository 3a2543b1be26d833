"""The formulas inside the Triton kernels: those of `transform` and `slopes`, on the values of one block.

All arithmetic is float32, whatever the logits' dtype.
"""

# mypy: disallow-untyped-defs=False
# Kernel arguments are pointers and scalars of the device language, which Python annotations do not describe.

from __future__ import annotations

import triton
import triton.language as tl

FORWARD_KL = tl.constexpr(0)
REVERSE_KL = tl.constexpr(1)
MIXTURE = tl.constexpr(2)
JSD = tl.constexpr(3)
SKEW_FORWARD_KL = tl.constexpr(4)
SKEW_REVERSE_KL = tl.constexpr(5)
TVD = tl.constexpr(6)
NOTHING = tl.constexpr(7)
KIND_CODES = {
    "forward_kl": 0, "reverse_kl": 1, "mixture": 2, "jsd": 3,
    "skew_forward_kl": 4, "skew_reverse_kl": 5, "tvd": 6, "nothing": 7,
}  # fmt: skip

PLAIN = tl.constexpr(0)
BUCKET = tl.constexpr(1)
RENORMALISE = tl.constexpr(2)
TAIL_CODES = {"drop": 0, "bucket": 1, "renormalise": 2}

HEADROOM = tl.constexpr(30.0)
"""How far a logit may exceed the reference before a row is rescaled: e³⁰ leaves float32 and bfloat16 ample room."""
TEACHER_TAIL_FLOOR = tl.constexpr(2.0**-23)
STUDENT_LOG_TAIL_FLOOR = tl.constexpr(-60.0)
SMALLEST_SHARE = tl.constexpr(1e-10)
"""The row factor is kept at least this share of the largest gradient at an id, so that dividing by it is safe; the
gradient of the other ids is then off by at most that share."""
NEGATIVE_INFINITY = tl.constexpr(float("-inf"))


@triton.jit
def transformed(x, scale, softcap, inverse_temperature, HAS_CAP: tl.constexpr):
    """Raw head output → tempered logit; −inf (a candidate taken out of its row, or padding) stays −inf."""
    z = x * scale
    if HAS_CAP:
        capped = softcap * (1.0 - 2.0 / (tl.exp(z * (2.0 / softcap)) + 1.0))
        z = tl.where(x == NEGATIVE_INFINITY, NEGATIVE_INFINITY, capped)
    return z * inverse_temperature


@triton.jit
def transform_slope(z, scale, softcap, inverse_temperature, HAS_CAP: tl.constexpr):
    """∂z/∂x as a function of z."""
    slope = scale * inverse_temperature
    if HAS_CAP:
        inner = z / (inverse_temperature * softcap)
        slope = slope * (1.0 - inner * inner)
    return slope


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
def scale_unless_one_kernel(x_ptr, factor_ptr, numel, BLOCK: tl.constexpr):
    """x *= factor; returns at once where the factor is 1, as it is for a plain loss.backward()."""
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor != 1.0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        valid = at < numel
        x = tl.load(x_ptr + at, mask=valid, other=0.0).to(tl.float32)
        tl.store(x_ptr + at, (x * factor).to(x_ptr.dtype.element_ty), mask=valid)
