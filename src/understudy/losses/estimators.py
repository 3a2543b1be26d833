"""Single-sample estimators of reverse KL from the token the student wrote, r = log q(y) − log p(y).

Value and gradient of an estimator differ. Averaged over y ~ q, each of k1, k2 (to second order) and k3
reports reverse KL. Differentiated, k1 gives nothing, k2 the gradient of reverse KL and k3 that of FORWARD
KL. The `+` forms report one value and carry k2's gradient (straight through). `describe` refuses what cannot
work.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from understudy.losses.describe import ESTIMATOR_ALIASES, ESTIMATOR_FORMULAS

LOG_RATIO_LIMIT = 20.0
"""k3's exponent is clamped to ±20 for its value; e²⁰ already means a token that the teacher finds 5·10⁸
times likelier."""


def estimate(kind: str, log_q_N: Tensor, log_p_N: Tensor) -> Tensor:
    """The estimator called `kind`, or by an alias of it, for each token [N], differentiable in log q."""
    return ESTIMATORS[ESTIMATOR_ALIASES.get(kind, kind)](log_q_N - log_p_N)


def k1(r: Tensor) -> Tensor:
    """r: unbiased and noisy; as a direct loss its expected gradient is zero."""
    return r


def k2(r: Tensor) -> Tensor:
    """r²/2: its gradient r·∇log q is reverse KL's, sample by sample."""
    return 0.5 * r.square()


def k3(r: Tensor) -> Tensor:
    """e⁻ʳ − 1 + r: unbiased, never negative; differentiated it follows FORWARD KL."""
    return torch.expm1(-_limit(r)) + r


def absolute(r: Tensor) -> Tensor:
    """|r|."""
    return r.abs()


def k1_plus(r: Tensor) -> Tensor:
    """Value of k1, gradient of k2."""
    return _straight_through(k1(r), k2(r))


def k3_plus(r: Tensor) -> Tensor:
    """Value of k3, gradient of k2."""
    return _straight_through(k3(r), k2(r))


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "abs": absolute,
    "k1+": k1_plus,
    "k3+": k3_plus,
}
assert ESTIMATORS.keys() == ESTIMATOR_FORMULAS.keys()


def _limit(r: Tensor) -> Tensor:
    """r clamped to ± the limit in value, with its gradient unchanged."""
    return r + (r.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT) - r).detach()


def _straight_through(value: Tensor, gradient: Tensor) -> Tensor:
    return value.detach() + gradient - gradient.detach()
