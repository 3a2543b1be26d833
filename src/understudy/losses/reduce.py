"""Reduction over the global batch, folded into one weight per token.

    token-mean            Σ_tokens l / (tokens of the whole step)
    seq-mean-token-sum    mean over sequences of Σ l
    seq-mean-token-mean   mean over sequences of mean l

Many trainers divide by counts of the micro-batch and then average micro-batches, which makes the gradient
depend on how rows were split. Here the denominators are those of the whole step, computed once before
anything is split: each token gets its weight, and every loss is Σ weight · l. Micro-batches and ranks then
simply add. (If a data-parallel wrapper averages gradients over R ranks, scale the loss by R.)

Shape legend: B sequences, N loss-bearing tokens (N = Σ lengths_B).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from understudy.errors import LossInputError

Reduction = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]


class BatchTotals(NamedTuple):
    """Denominators of one step, over every rank and micro-batch."""

    tokens: int
    """Loss-bearing tokens."""
    sequences: int
    """Sequences with at least one loss-bearing token."""


def batch_totals(lengths_B: Tensor | Sequence[int]) -> BatchTotals:
    """Totals of a batch from the number of loss-bearing tokens in each of its sequences."""
    lengths = _lengths(lengths_B)
    return BatchTotals(int(lengths.sum()), int((lengths > 0).sum()))


def token_weights(
    lengths_B: Tensor | Sequence[int], mode: Reduction = "token-mean", total: BatchTotals | None = None
) -> Tensor:
    """float32 weights [N] of the tokens of these sequences, in order.

    `total` holds the denominators of the whole step if `lengths_B` is only a part of it (one rank, one
    micro-batch); without it these sequences are the whole step. A batch without tokens gives an empty
    tensor.
    """
    if mode not in get_args(Reduction):
        raise LossInputError(f"unknown reduction {mode!r}; expected one of {', '.join(get_args(Reduction))}.")
    lengths = _lengths(lengths_B)
    own = batch_totals(lengths)
    totals = own if total is None else total
    if totals.tokens < own.tokens or totals.sequences < own.sequences:
        raise LossInputError(
            f"the step's totals {totals} are smaller than this part's own {own}; pass the counts of the global batch."
        )
    if mode == "token-mean":
        per_sequence = torch.full_like(lengths, 1.0 / max(totals.tokens, 1), dtype=torch.float64)
    elif mode == "seq-mean-token-sum":
        per_sequence = torch.full_like(lengths, 1.0 / max(totals.sequences, 1), dtype=torch.float64)
    else:
        per_sequence = 1.0 / (max(totals.sequences, 1) * lengths.clamp_min(1).double())
    return per_sequence.repeat_interleave(lengths).float()


def _lengths(lengths_B: Tensor | Sequence[int]) -> Tensor:
    lengths = torch.as_tensor(lengths_B)
    if lengths.numel() == 0:
        return torch.zeros(0, dtype=torch.int64)
    if lengths.ndim != 1 or lengths.is_floating_point():
        raise LossInputError(f"lengths_B must be integers [B]; got {lengths.dtype} {list(lengths.shape)}.")
    if int(lengths.min()) < 0:
        raise LossInputError(
            f"lengths_B holds {int(lengths.min())}; a sequence has at least 0 loss-bearing tokens."
        )
    return lengths.long()
