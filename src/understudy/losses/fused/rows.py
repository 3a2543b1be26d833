"""The protocol between the chunk loop and the readers of a chunk of logits (torch, Triton).

Shape legend: C tokens of the chunk, K candidates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from understudy.losses.per_token import StudentView, TokenTerms, token_losses
from understudy.types.loss import LossInputs


@dataclass(frozen=True)
class ViewGradients:
    """∂(Σ weights · l) / ∂ each leaf of a `StudentView`; None where the view has no such leaf."""

    logp_N: Tensor
    logp_NK: Tensor | None
    log_tail_N: Tensor | None
    divergence_N: Tensor | None
    has_logp: bool = True
    """False if the loss does not depend on log q of the written token, so that `logp_N` is all zeros."""

    def sum(self) -> Tensor:
        """Sum over all log-probability leaves of a token [C]."""
        total = self.logp_N
        if self.logp_NK is not None:
            total = total + self.logp_NK.sum(-1)
        if self.log_tail_N is not None:
            total = total + self.log_tail_N
        return total


class Rows(Protocol):
    """One chunk of logits that has been read."""

    @property
    def view(self) -> StudentView: ...

    def gradient(self, grads: ViewGradients) -> tuple[Tensor, Tensor | None]:
        """(d_CV, scale_C): the gradient of the raw logits is scale_C · d_CV; a scale of None means 1."""
        ...


def differentiate(
    terms: TokenTerms, view: StudentView, inputs: LossInputs
) -> tuple[Tensor, dict[str, Tensor], ViewGradients]:
    """(Σ weights · l, columns, gradients): runs the loss of a chunk under autograd, on the few numbers per
    token of its view."""
    names = (
        ("logp_N", "divergence_N") if view.divergence_N is not None else ("logp_N", "logp_NK", "log_tail_N")
    )
    leaves = {
        name: leaf.detach().requires_grad_() for name in names if (leaf := getattr(view, name)) is not None
    }
    with torch.enable_grad():
        losses_C, columns = token_losses(terms, replace(view, **leaves), inputs)
        total = (inputs.weights_N * losses_C).sum()
        found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    by_name: dict[str, Tensor | None] = dict.fromkeys(("logp_N", "logp_NK", "log_tail_N", "divergence_N"))
    for (name, leaf), gradient in zip(leaves.items(), found, strict=True):
        by_name[name] = torch.zeros_like(leaf) if gradient is None else gradient
    logp_N = by_name.pop("logp_N")
    assert logp_N is not None
    return total.detach(), columns, ViewGradients(logp_N, **by_name, has_logp=found[0] is not None)
