"""Merged linear layers: weights over the same input, contiguous in memory, multiplied in one product.

Queries, keys and values of a layer are three products of the same states; gate and up are two. A decode
step is short, so every launch saved counts. The parameters remain separate tensors under their own names.
Only their memory moves, so training, saving and publishing work unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


class MergedLinear:
    """Several linear layers as one product. It views the parameters' memory: updates in place take effect."""

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
    """Moves weights of one dtype, device and inner shape into one block; parameters keep their identity."""
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
    """A view of the tensors as one, along their first axis; None if they are not contiguous in memory."""
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
