"""f-divergences between a teacher p and a student q, from log-probabilities over the last dimension.

These are the reference formulas that every fused path must equal. Each takes proper (or, with `tail =
"drop"`, truncated) log-distributions and returns the divergence of each row, differentiable in log q.

Shape legend: … any leading shape, M outcomes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from understudy.losses.describe import DIVERGENCE_FORMULAS


@dataclass(frozen=True)
class DivergenceParameters:
    """Parameters of the divergences; each is read by the kinds that name it."""

    beta: float = 0.5
    """`jsd`: 0 forward KL, 1 reverse KL (TRL's convention)."""
    alpha: float = 0.1
    """`skew_*`: share of the first distribution mixed into the second."""
    mixture_weight: float = 0.5
    """`mixture`: weight of forward KL."""


def divergence(kind: str, log_p: Tensor, log_q: Tensor, parameters: DivergenceParameters) -> Tensor:
    """The divergence called `kind` of each row [...]."""
    return DIVERGENCES[kind](log_p, log_q, parameters)


def kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """KL(a‖b) = Σ a·(log a − log b); an outcome with a = 0 adds nothing."""
    terms = log_a.exp() * (log_a - log_b)
    return torch.where(torch.isneginf(log_a), 0.0, terms).sum(-1)


def forward_kl(log_p: Tensor, log_q: Tensor, parameters: DivergenceParameters) -> Tensor:
    """KL(p‖q): covers every mode of the teacher."""
    return kl(log_p, log_q)


def reverse_kl(log_p: Tensor, log_q: Tensor, parameters: DivergenceParameters) -> Tensor:
    """KL(q‖p): settles on the teacher's modes the student can reach."""
    return kl(log_q, log_p)


def jsd(log_p: Tensor, log_q: Tensor, parameters: DivergenceParameters) -> Tensor:
    """β·KL(p‖m) + (1−β)·KL(q‖m) with m = β·p + (1−β)·q; the two ends are the plain KLs by convention."""
    beta = parameters.beta
    if beta == 0.0:
        return kl(log_p, log_q)
    if beta == 1.0:
        return kl(log_q, log_p)
    log_m = _log_mix(beta, log_p, log_q)
    return beta * kl(log_p, log_m) + (1 - beta) * kl(log_q, log_m)


def skew_forward_kl(log_p: Tensor, log_q: Tensor, parameters: DivergenceParameters) -> Tensor:
    """KL(p ‖ α·p + (1−α)·q): forward KL whose gradient stays bounded where q vanishes."""
    return kl(log_p, _log_mix(parameters.alpha, log_p, log_q))


def skew_reverse_kl(log_p: Tensor, log_q: Tensor, parameters: DivergenceParameters) -> Tensor:
    """KL(q ‖ α·q + (1−α)·p): reverse KL that stays finite where p vanishes."""
    return kl(log_q, _log_mix(parameters.alpha, log_q, log_p))


def tvd(log_p: Tensor, log_q: Tensor, parameters: DivergenceParameters) -> Tensor:
    """Total variation ½ Σ |p − q|, in [0, 1]."""
    return 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1)


def mixture(log_p: Tensor, log_q: Tensor, parameters: DivergenceParameters) -> Tensor:
    """λ·KL(p‖q) + (1−λ)·KL(q‖p)."""
    weight = parameters.mixture_weight
    return weight * kl(log_p, log_q) + (1 - weight) * kl(log_q, log_p)


DIVERGENCES: dict[str, Callable[[Tensor, Tensor, DivergenceParameters], Tensor]] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jsd": jsd,
    "skew_forward_kl": skew_forward_kl,
    "skew_reverse_kl": skew_reverse_kl,
    "tvd": tvd,
    "mixture": mixture,
}
assert DIVERGENCES.keys() == DIVERGENCE_FORMULAS.keys()


def _log_mix(share: float, log_a: Tensor, log_b: Tensor) -> Tensor:
    """log(share·a + (1 − share)·b)."""
    if share == 0.0:
        return log_b
    return torch.logaddexp(log_a + math.log(share), log_b + math.log1p(-share))
