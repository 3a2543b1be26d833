"""Importance correction for the mismatch between the sampling engine and the trainer.

The engine and the trainer compute the same weights with different kernels, and in an asynchronous run with
weights of different ages. With δ = log q_old(y) − log q_behaviour(y) of each written token (old: the
trainer's own logprob before the first update of the step), the ratio e^δ is 1 where both agree. The clipped
ratio of the policy loss is taken against q_old. The remaining ratio of old to behaviour is corrected here,
in two ways that can be combined:

    weigh    multiply a policy loss by min(ratio, cap): truncated importance sampling, which bounds the variance
    drop     give a token (or its whole sequence) the factor 0 if the ratio is outside [low, high]

A ratio is that of the token, or of the sequence: the product over its tokens (exact, but useless for long
sequences) or their geometric mean (independent of length).

Shape legend: B sequences, N tokens (N = Σ lengths_B).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from understudy.errors import LossInputError
from understudy.losses.policy import LOG_RATIO_LIMIT

Level = Literal["off", "token", "sequence", "geometric"]

QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}


@dataclass(frozen=True)
class CorrectionSettings:
    """Which corrections are applied; none by default."""

    weigh: Level = "off"
    cap: float = 2.0
    """Ratios above this are truncated to it."""
    drop: Level = "off"
    low: float = 0.5
    high: float = 2.0

    @property
    def active(self) -> bool:
        return self.weigh != "off" or self.drop != "off"


def importance_weights(
    old_N: Tensor, behaviour_N: Tensor, lengths_B: Sequence[int], settings: CorrectionSettings
) -> Tensor:
    """float32 [N]: the factor of each token's policy loss; constant, so no gradient flows through it."""
    log_ratio_N = _log_ratio(old_N, behaviour_N, lengths_B)
    weights_N = torch.ones_like(log_ratio_N)
    if settings.weigh != "off":
        weights_N = LEVELS[settings.weigh](log_ratio_N, lengths_B).exp().clamp_max(settings.cap)
    if settings.drop != "off":
        ratio_N = LEVELS[settings.drop](log_ratio_N, lengths_B).exp()
        kept_N = (ratio_N >= settings.low) & (ratio_N <= settings.high)
        weights_N = torch.where(kept_N, weights_N, 0.0)
    return weights_N.float()


def mismatch_metrics(old_N: Tensor, behaviour_N: Tensor, lengths_B: Sequence[int]) -> dict[str, float]:
    """The mismatch in numbers, under verl's names where it has one; over every loss-bearing token of the
    step."""
    delta_N = _log_ratio(old_N, behaviour_N, lengths_B)
    if delta_N.numel() == 0:
        return {}
    ratio_N = delta_N.exp()
    sequences = _by_sequence(delta_N, lengths_B)
    metrics = {
        "rollout_corr/kl": -delta_N.mean(),
        "rollout_corr/k3_kl": (delta_N.expm1() - delta_N).mean(),
        "rollout_corr/log_ppl_diff": torch.stack([part.mean() for part in sequences]).mean().neg(),
        "rollout_corr/abs_diff_mean": delta_N.abs().mean(),
        "rollout_corr/abs_diff_max": delta_N.abs().max(),
        "rollout_corr/ratio_min": ratio_N.min(),
        "rollout_corr/ratio_max": ratio_N.max(),
        "training/rollout_probs_diff_mean": (old_N.double().exp() - behaviour_N.double().exp()).abs().mean(),
        "training/rollout_probs_diff_max": (old_N.double().exp() - behaviour_N.double().exp()).abs().max(),
    }
    metrics |= {f"rollout_corr/ratio_{name}": _quantile(ratio_N, share) for name, share in QUANTILES.items()}
    return {name: float(value) for name, value in metrics.items()}


def correction_metrics(
    weights_N: Tensor,
    old_N: Tensor,
    behaviour_N: Tensor,
    lengths_B: Sequence[int],
    settings: CorrectionSettings,
) -> dict[str, float]:
    """What the correction did: verl's `rollout_is_*` for the weights, `rollout_rs_*` for what was dropped."""
    if weights_N.numel() == 0:
        return {}
    log_ratio_N = _log_ratio(old_N, behaviour_N, lengths_B)
    weights = weights_N.double()
    metrics = {
        "rollout_corr/rollout_is_mean": weights.mean(),
        "rollout_corr/rollout_is_min": weights.min(),
        "rollout_corr/rollout_is_max": weights.max(),
        # Kish: 1 if all weights are equal, 1/N if one token has all the weight.
        "rollout_corr/rollout_is_eff_sample_size": weights.sum().square()
        / (len(weights) * weights.square().sum()).clamp_min(1e-30),
    }
    if settings.weigh != "off":
        raw_N = LEVELS[settings.weigh](log_ratio_N, lengths_B).exp()
        metrics["rollout_corr/rollout_is_ratio_fraction_high"] = (raw_N > settings.cap).double().mean()
        metrics["rollout_corr/rollout_is_ratio_fraction_low"] = (raw_N < 1 / settings.cap).double().mean()
    if settings.drop != "off":
        dropped_N = (weights_N == 0).double()
        metrics["rollout_corr/rollout_rs_masked_fraction"] = dropped_N.mean()
        metrics["rollout_corr/rollout_rs_seq_masked_fraction"] = torch.stack(
            [part.max() for part in _by_sequence(dropped_N, lengths_B)]
        ).mean()
    return {name: float(value) for name, value in metrics.items()}


def _log_ratio(old_N: Tensor, behaviour_N: Tensor, lengths_B: Sequence[int]) -> Tensor:
    if old_N.shape != behaviour_N.shape or old_N.ndim != 1 or sum(lengths_B) != len(old_N):
        raise LossInputError(
            f"{list(old_N.shape)} old and {list(behaviour_N.shape)} behaviour logprobs for sequences of {sum(lengths_B)} "
            "tokens; there must be one of each per token."
        )
    delta_N = (old_N.detach().double() - behaviour_N.detach().double()).clamp(
        -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT
    )
    if not bool(torch.isfinite(delta_N).all()):
        raise LossInputError(
            "old or behaviour logprobs hold a value that is not finite; every written token needs both."
        )
    return delta_N


def _by_sequence(values_N: Tensor, lengths_B: Sequence[int]) -> list[Tensor]:
    return [part for part in values_N.split(list(lengths_B)) if len(part)]


def _of_sequence(log_ratio_N: Tensor, lengths_B: Sequence[int], total: Callable[[Tensor], Tensor]) -> Tensor:
    parts = [
        total(part).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).expand(len(part))
        for part in _by_sequence(log_ratio_N, lengths_B)
    ]
    return torch.cat(parts) if parts else log_ratio_N


LEVELS: dict[str, Callable[[Tensor, Sequence[int]], Tensor]] = {
    "token": lambda log_ratio_N, lengths_B: log_ratio_N,
    "sequence": lambda log_ratio_N, lengths_B: _of_sequence(log_ratio_N, lengths_B, torch.sum),
    "geometric": lambda log_ratio_N, lengths_B: _of_sequence(log_ratio_N, lengths_B, torch.mean),
}
"""Log-ratio of each token at the chosen level; a sequence's ratio is given to all its tokens."""


def _quantile(values_N: Tensor, share: float) -> Tensor:
    """The value at this share of the sorted tokens (torch.quantile refuses more than 2²⁴ of them)."""
    place = min(len(values_N) - 1, int(share * len(values_N)))
    return values_N.kthvalue(place + 1).values
