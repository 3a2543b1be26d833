"""Closed-form gradients of the divergences with respect to the student's logits.

For D = Σ φ(p, q) over a softmax q of logits z,   ∂D/∂z_j = s_j − q_j · Σ_i s_i   with the slope   s_j = q_j · ∂φ/∂q_j.
Constants added to ∂φ/∂q drop out of the difference and are left out of the slopes.

Shape legend: … rows, V outcomes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from understudy.losses.divergences import DIVERGENCES, DivergenceParameters


def divergence_and_slope(
    kind: str, log_p: Tensor, log_q: Tensor, parameters: DivergenceParameters
) -> tuple[Tensor, Tensor]:
    """(divergence [...], slope [..., V]) of finite log-distributions."""
    return SLOPES[kind](log_p, log_q, parameters)


def _forward_kl(log_p: Tensor, log_q: Tensor, parameters: DivergenceParameters) -> tuple[Tensor, Tensor]:
    p = log_p.exp()
    return torch.linalg.vecdot(p, log_p - log_q), p.neg_()


def _reverse_kl(log_p: Tensor, log_q: Tensor, parameters: DivergenceParameters) -> tuple[Tensor, Tensor]:
    slope = (log_q - log_p).mul_(log_q.exp())
    return slope.sum(-1), slope


def _jsd(log_p: Tensor, log_q: Tensor, parameters: DivergenceParameters) -> tuple[Tensor, Tensor]:
    beta = parameters.beta
    if beta == 0.0:
        return _forward_kl(log_p, log_q, parameters)
    if beta == 1.0:
        return _reverse_kl(log_p, log_q, parameters)
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    slope = (log_q - log_m).mul_(log_q.exp()).mul_(1 - beta)
    return beta * torch.linalg.vecdot(log_p.exp(), log_p - log_m) + slope.sum(-1), slope


def _skew_forward_kl(log_p: Tensor, log_q: Tensor, parameters: DivergenceParameters) -> tuple[Tensor, Tensor]:
    alpha = parameters.alpha
    if alpha == 0.0:
        return _forward_kl(log_p, log_q, parameters)
    log_m = torch.logaddexp(log_p + math.log(alpha), log_q + math.log1p(-alpha))
    value = torch.linalg.vecdot(log_p.exp(), log_p - log_m)
    return value, (log_p + log_q).sub_(log_m).exp_().mul_(alpha - 1)


def _skew_reverse_kl(log_p: Tensor, log_q: Tensor, parameters: DivergenceParameters) -> tuple[Tensor, Tensor]:
    alpha = parameters.alpha
    if alpha == 0.0:
        return _reverse_kl(log_p, log_q, parameters)
    log_m = torch.logaddexp(log_q + math.log(alpha), log_p + math.log1p(-alpha))
    q, log_ratio = log_q.exp(), log_q - log_m
    value = torch.linalg.vecdot(q, log_ratio)
    return value, log_ratio.exp().mul_(-alpha).add_(log_ratio).mul_(q)


def _tvd(log_p: Tensor, log_q: Tensor, parameters: DivergenceParameters) -> tuple[Tensor, Tensor]:
    q = log_q.exp()
    gap = q - log_p.exp()
    return 0.5 * gap.abs().sum(-1), gap.sign_().mul_(q).mul_(0.5)


def _mixture(log_p: Tensor, log_q: Tensor, parameters: DivergenceParameters) -> tuple[Tensor, Tensor]:
    weight = parameters.mixture_weight
    forward, forward_slope = _forward_kl(log_p, log_q, parameters)
    reverse, reverse_slope = _reverse_kl(log_p, log_q, parameters)
    return weight * forward + (1 - weight) * reverse, forward_slope.mul_(weight).add_(
        reverse_slope, alpha=1 - weight
    )


SLOPES: dict[str, Callable[[Tensor, Tensor, DivergenceParameters], tuple[Tensor, Tensor]]] = {
    "forward_kl": _forward_kl,
    "reverse_kl": _reverse_kl,
    "jsd": _jsd,
    "skew_forward_kl": _skew_forward_kl,
    "skew_reverse_kl": _skew_reverse_kl,
    "tvd": _tvd,
    "mixture": _mixture,
}
assert SLOPES.keys() == DIVERGENCES.keys()
