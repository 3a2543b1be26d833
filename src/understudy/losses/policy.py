"""Clipped policy gradients, for task rewards and for −k1 as an advantage.

    ρ = q(y) / q_anchor(y)
    l = −min(ρ·A, clip(ρ, 1−low, 1+high)·A)            and at most dual_clip·|A| where A < 0

The anchor is `old_logprobs_N` (the trainer's own, at the start of the step) if given, else the behaviour
engine's. Truncated importance sampling multiplies l by min(q_old/q_behaviour, cap): the engine's numerics
and the age of its weights enter there, bounded, and not in the ratio that is clipped. Without old logprobs
the current policy, held constant, is used. `importance_N` is the general form: a factor computed beforehand
for the whole step (`correction.py`), at token or sequence level, with 0 where a token is dropped.

Shape legend: N tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from understudy.errors import LossInputError

LOG_RATIO_LIMIT = 20.0
"""|log ρ| is clamped to this (as in verl): e²⁰ does not overflow and is clipped anyway."""


class PolicyLoss(NamedTuple):
    """Per-token policy loss with the flags its metrics need; only `loss_N` carries a gradient."""

    loss_N: Tensor
    log_ratio_N: Tensor
    clipped_N: Tensor
    """1 where the clip cut this token's gradient."""
    clipped_lower_N: Tensor
    """1 where the dual clip did."""
    importance_N: Tensor
    """Importance weight the loss was multiplied with (1 without a correction)."""


class ClipSettings(NamedTuple):
    """How far the policy may move from its anchor before a token's gradient is cut."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    tis_cap: float | None = None


def policy_loss(
    logp_N: Tensor,
    advantages_N: Tensor,
    behaviour_logprobs_N: Tensor | None,
    old_logprobs_N: Tensor | None,
    settings: ClipSettings,
    importance_N: Tensor | None = None,
) -> PolicyLoss:
    """Clipped policy loss of each token with its importance weight."""
    if importance_N is not None and settings.tis_cap is not None:
        raise LossInputError(
            "tis_cap and importance_N both weigh a token by q_old / q_behaviour; give one of them."
        )
    anchor = _anchor(logp_N, behaviour_logprobs_N, old_logprobs_N, settings.tis_cap)
    result = clipped_policy_loss(
        logp_N, anchor, advantages_N, settings.clip_low, settings.clip_high, settings.dual_clip
    )
    if importance_N is not None:
        return result._replace(loss_N=importance_N * result.loss_N, importance_N=importance_N)
    if settings.tis_cap is None:
        return result
    assert behaviour_logprobs_N is not None  # _anchor raises if it is None
    importance = torch.exp(anchor - behaviour_logprobs_N).clamp_max(settings.tis_cap)
    return result._replace(loss_N=importance * result.loss_N, importance_N=importance)


def clipped_policy_loss(
    logp_N: Tensor,
    anchor_N: Tensor,
    advantages_N: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """PPO's clipped surrogate, with the dual clip that bounds it for negative advantages."""
    log_ratio = (logp_N - anchor_N).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    plain = -advantages_N * ratio
    clipped = -advantages_N * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(plain, clipped)
    was_clipped = clipped > plain
    was_bounded = torch.zeros_like(was_clipped)
    if dual_clip is not None:
        bound = -advantages_N * dual_clip
        was_bounded = (advantages_N < 0) & (loss > bound)
        loss = torch.where(advantages_N < 0, torch.minimum(loss, bound), loss)
    return PolicyLoss(
        loss, log_ratio.detach(), was_clipped.float(), was_bounded.float(), torch.ones_like(ratio.detach())
    )


def _anchor(
    logp_N: Tensor, behaviour_logprobs_N: Tensor | None, old_logprobs_N: Tensor | None, tis_cap: float | None
) -> Tensor:
    if tis_cap is not None and behaviour_logprobs_N is None:
        raise LossInputError(
            "tis_cap is set, but behaviour_logprobs_N is missing: importance weights need them."
        )
    if old_logprobs_N is not None:
        return old_logprobs_N
    if tis_cap is not None:
        return logp_N.detach()
    if behaviour_logprobs_N is not None:
        return behaviour_logprobs_N
    raise LossInputError(
        "a policy gradient needs behaviour_logprobs_N (from the engine that sampled) or old_logprobs_N "
        "(from the trainer at the start of the step); neither was given."
    )
