"""The critic's loss for PPO: `value_loss`, and `ValueObjective`, its form as a policy's objective.

Shape legend: N tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from understudy.errors import LossInputError
from understudy.types.loss import LossInputs, LossOutput, StudentHead
from understudy.types.loss_metrics import Metric, MetricSum, MetricTotal


class ValueLoss(NamedTuple):
    """The critic's loss on one micro-batch."""

    loss: Tensor
    """Scalar, differentiable: Σ weights_N · l_N."""
    per_token_N: Tensor
    """Detached."""
    metrics: dict[str, Metric]


def value_loss(
    values_N: Tensor, returns_N: Tensor, old_values_N: Tensor, weights_N: Tensor, clip: float = 0.5
) -> ValueLoss:
    """½ · Σ weights · max((v − R)², (v_clipped − R)²), v_clipped within ± `clip` of the value before the step."""
    for name, tensor in (("returns_N", returns_N), ("old_values_N", old_values_N), ("weights_N", weights_N)):
        if tensor.shape != values_N.shape:
            raise LossInputError(
                f"{name} has shape {list(tensor.shape)}, values_N {list(values_N.shape)}; they must agree."
            )
    if not clip > 0:
        raise LossInputError(f"clip must be above 0; got {clip:g}.")
    values = values_N.float()
    clipped = torch.clamp(values, old_values_N - clip, old_values_N + clip)
    plain_error, clipped_error = (values - returns_N).square(), (clipped - returns_N).square()
    losses = 0.5 * torch.maximum(plain_error, clipped_error)
    loss = (weights_N * losses).sum()
    counts = (weights_N > 0).float()
    tokens = counts.sum()
    metrics: dict[str, Metric] = {
        "critic/vf_loss": MetricTotal(loss.detach()),
        "critic/vf_clipfrac": MetricSum((counts * (clipped_error > plain_error).float()).sum(), tokens),
        "critic/vpred_mean": MetricSum((counts * values.detach()).sum(), tokens),
    }
    return ValueLoss(loss, losses.detach(), metrics)


@dataclass(frozen=True)
class ValueObjective:
    """The critic's objective on one micro-batch: `read` computes a value per token, `returns_N` is its
    target."""

    read: Callable[[StudentHead, LossInputs], Tensor]
    clip: float = 0.5

    def __call__(self, head: StudentHead, inputs: LossInputs) -> LossOutput:
        if inputs.returns_N is None or inputs.old_values_N is None:
            raise LossInputError(
                "a critic learns from returns_N and old_values_N; at least one of them is missing."
            )
        values_N = self.read(head, inputs)
        result = value_loss(values_N, inputs.returns_N, inputs.old_values_N, inputs.weights_N, self.clip)
        return LossOutput(result.loss, result.per_token_N, values_N.detach(), result.metrics)
