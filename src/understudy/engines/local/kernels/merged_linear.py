"""Weights of products over the same input, laid one after another in memory, so that one product does for all of them.

Queries, keys and values of a layer are three products of the same states, gates and their factors two. A decode step is short, and
every product it need not start counts. The parameters stay what they are, tensors of their own under their own names; only
where they lie changes, so whoever trains, saves or publishes them notices nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


class Together:
    """Several linear layers as one. Weights are read where they lie: an update in place is seen."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self._sizes = [one.out_features for one in linears]
        weights, biases = [one.weight for one in linears], [one.bias for one in linears]
        self._weight = as_one(weights)
        self._bias = None if biases[0] is None else as_one(biases)
        self._apart = (
            None if self._weight is not None and (biases[0] is None) == (self._bias is None) else linears
        )

    def __call__(self, states_RF: Tensor) -> Sequence[Tensor]:
        if self._apart is not None:
            return [one(states_RF) for one in self._apart]
        assert self._weight is not None
        return linear(states_RF, self._weight, self._bias).split(self._sizes, -1)


def lay_side_by_side(linears: Sequence[nn.Linear]) -> None:
    """Moves the weights into one block, if they are alike; parameters keep their identity."""
    for name in ("weight", "bias"):
        tensors = [getattr(one, name) for one in linears]
        if any(type(one) is not nn.Parameter for one in tensors) or as_one(tensors) is not None:
            continue
        if len({(one.dtype, one.device, one.shape[1:]) for one in tensors}) != 1:
            continue
        block = torch.cat([one.data for one in tensors])
        for one, piece in zip(tensors, block.split([len(one) for one in tensors]), strict=True):
            one.data = piece


def as_one(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """The tensors as one, along their first axis, without a copy; None where they do not lie that way."""
    first = tensors[0]
    if first is None or any(one is None for one in tensors):
        return None
    end, rows = first.data_ptr(), 0
    for one in tensors:
        assert one is not None
        alike = one.dtype == first.dtype and one.shape[1:] == first.shape[1:] and one.is_contiguous()
        same = one.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not alike or not same or one.data_ptr() != end:
            return None
        end += one.nbytes
        rows += len(one)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride())
