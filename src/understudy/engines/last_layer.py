"""The last layer's feed-forward part, only where somebody reads it.

What a layer writes at one position is seen by other positions through the attention of the layers above it. Above the last
layer there is none: its feed-forward part, most of its work, matters only at the positions whose states are read (those that
predict a written token; in a prompt pass the last one). With prompts of 200 tokens and answers of 100 that is a third of
one layer; of a model with three layers, a fifth of everything.

Used on a CPU, where a pass costs what its products cost. A model whose last layer is built in another way, or whose states
come out differently, is left alone: that is tried once for each model, on a few tokens.

Legend: B rows, L columns, N positions that are read, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

TOLERANCE = 1e-4
WORTH_CUTTING = 0.75
"""The share of all positions above which picking them out costs more than it saves."""


class LastLayer:
    """Of one body. To be made while the body's own attention is in use: that is when it is tried."""

    def __init__(self, body: Any) -> None:
        layers = getattr(body, "layers", None)
        self._layer = layers[-1] if isinstance(layers, nn.ModuleList) and len(layers) else nn.Identity()
        part = getattr(self._layer, "mlp", None)
        self._part = part if isinstance(part, nn.Module) and _changes_nothing(body, part) else None

    @property
    def can_be_cut(self) -> bool:
        """Not what is compiled: a compiled layer may go on with what it saw when it was traced."""
        return self._part is not None and self._layer._compiled_call_impl is None

    @contextmanager
    def read_only_at(self, places_N: Tensor, positions: int) -> Iterator[None]:
        """A pass inside gives the states at `places_N`, counted over all of its `positions`; others are not to be used."""
        if self._part is None or not self.can_be_cut or len(places_N) > WORTH_CUTTING * positions:
            yield
            return
        with _cut(self._part, places_N):
            yield


_known: WeakKeyDictionary[nn.Module, LastLayer] = WeakKeyDictionary()


def last_layer_of(body: Any) -> LastLayer:
    """The same as long as the body lives, tried once."""
    if body not in _known:
        _known[body] = LastLayer(body)
    return _known[body]


@contextmanager
def _cut(part: nn.Module, places_N: Tensor) -> Iterator[None]:
    shapes: list[torch.Size] = []

    def pick(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        states_BLH = inputs[0]
        shapes.append(states_BLH.shape)
        return (states_BLH.reshape(-1, states_BLH.shape[-1]).index_select(0, places_N)[None], *inputs[1:])

    def put_back(_module: nn.Module, _inputs: tuple[Any, ...], found_1NH: Tensor) -> Tensor:
        shape = shapes.pop()
        whole = found_1NH.new_zeros(shape.numel() // shape[-1], found_1NH.shape[-1])
        return whole.index_copy(0, places_N, found_1NH[0]).view(*shape[:-1], -1)

    before, after = part.register_forward_pre_hook(pick), part.register_forward_hook(put_back)
    try:
        yield
    finally:
        before.remove()
        after.remove()


@torch.no_grad()
def _changes_nothing(body: Any, part: nn.Module) -> bool:
    embedding = body.get_input_embeddings().weight
    if embedding.device.type != "cpu":
        return False
    ids_BL = torch.arange(12).view(2, 6) % embedding.shape[0]
    places_N = torch.tensor([1, 4, 5, 11])
    try:
        whole_NH = _states(body, ids_BL)[places_N]
        with _cut(part, places_N):
            found_NH = _states(body, ids_BL)[places_N]
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError):  # other code, other arguments
        return False
    return bool((found_NH - whole_NH).abs().max() <= TOLERANCE * max(1.0, float(whole_NH.abs().max())))


def _states(body: Any, ids_BL: Tensor) -> Tensor:
    states_BLH: Tensor = body(input_ids=ids_BL, use_cache=False).last_hidden_state
    return states_BLH.flatten(0, 1)
