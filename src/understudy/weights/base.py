"""What publishing weights means.

A version is the number of optimizer steps behind the weights. After `publish(v)` returns, every token an engine starts
to write carries version v.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor, nn

NamedTensors = Iterable[tuple[str, Tensor]]


class WeightPublisher(Protocol):
    """Takes the trained weights to wherever tokens are written."""

    @property
    def version(self) -> int:
        """The last version published; −1 before the first."""
        ...

    async def publish(self, version: int) -> None:
        """Makes the current weights known as `version`; versions only grow, save for a return to a checkpoint."""
        ...


class WeightReceiver(Protocol):
    """An engine, as a publisher sees it."""

    async def update_weights(self, version: int, tensors: NamedTensors) -> None:
        """Takes the weights over; no tensors at all means that the receiver shares the trained ones already."""
        ...


class SharingReceiver(WeightReceiver, Protocol):
    """An engine in this process that can generate with the very tensors that are trained."""

    def share_parameters_with(self, model: nn.Module) -> None: ...


class WeightSource(Protocol):
    """Where a publisher gets whole tensors from, by the model's own names (a tied tensor once)."""

    def named_weights(self) -> Sequence[tuple[str, Tensor]]: ...


class AdapterSource(Protocol):
    """A student whose adapters may be published alone, for engines that merge them themselves (`engines.adapters`)."""

    def named_adapters(self) -> Sequence[tuple[str, Tensor]]: ...


class ModelWeights:
    """A model on one device as a weight source."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def named_weights(self) -> list[tuple[str, Tensor]]:
        return [(name, parameter.detach()) for name, parameter in self._model.named_parameters()]
