"""Old logprobs against the engine's: when they are computed, what is logged, what a batch is given to make up for it."""

from __future__ import annotations

import torch

from understudy.config import LossConfig
from understudy.losses.correction import (
    CorrectionSettings,
    correction_metrics,
    importance_weights,
    mismatch_metrics,
)
from understudy.types.far_batch import AnyBatch
from understudy.types.jagged import Jagged


def correction_settings(loss: LossConfig) -> CorrectionSettings:
    chosen = loss.correction
    return CorrectionSettings(chosen.weigh, chosen.cap, chosen.drop, chosen.low, chosen.high)


def needs_old_logprobs(loss: LossConfig, updates: int) -> bool:
    """Whether the trainer's own logprobs before the step enter this loss.

    With one update they equal the ones of its own forward pass: the ratio is 1 and nothing is gained. A divergence has no
    ratio at all.
    """
    if loss.correction.measure or correction_settings(loss).active:
        return True
    if loss.kl_coef > 0 and loss.kl_in == "reward":
        return True
    return updates > 1 and (loss.task_coef > 0 or (loss.policy_gradient and loss.distill_coef > 0))


def corrected(batch: AnyBatch, old: Jagged, loss: LossConfig) -> tuple[AnyBatch, dict[str, float]]:
    """The batch with its importance weights, where the recipe asks for some, and the distance in numbers."""
    lengths = old.lengths.tolist()
    behaviour_N = behaviour_of(batch)
    metrics = mismatch_metrics(old.values, behaviour_N, lengths)
    settings = correction_settings(loss)
    if not settings.active:
        return batch, metrics
    weights_N = importance_weights(old.values, behaviour_N, lengths, settings)
    metrics |= correction_metrics(weights_N, old.values, behaviour_N, lengths, settings)
    return batch.with_columns(importance=Jagged(weights_N, old.offsets)), metrics


def behaviour_of(batch: AnyBatch) -> torch.Tensor:
    """[N]: the engine's logprobs of the loss-bearing tokens, all rows one after another."""
    here = batch.streams()
    return here.behaviour_logprobs.values[here.loss_mask.values]
