"""Publishing to an engine that lives in the trainer's own process."""

from __future__ import annotations

import asyncio
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


class SharedWeights:
    """Engine and policy hold the same tensors: an optimizer step *is* the new weights, publishing only counts it up.

    Right for the sync trainer, where nobody generates while the optimizer writes. Where both run at once, a generation
    could see half a step: use `CopiedWeights` there.
    """

    def __init__(self, model: nn.Module, engine: SharingReceiver) -> None:
        engine.share_parameters_with(model)
        self._engine = engine
        self._version = -1

    @property
    def version(self) -> int:
        return self._version

    async def publish(self, version: int) -> None:
        await self._engine.update_weights(version, ())
        self._version = version


class CopiedWeights:
    """The engine has tensors of its own, and each version is copied into them between two of its steps."""

    def __init__(self, source: WeightSource, engine: WeightReceiver) -> None:
        self._source = source
        self._engine = engine
        self._version = -1
        self.published_bytes = 0
        """Of the last version, to each engine."""

    @property
    def version(self) -> int:
        return self._version

    async def publish(self, version: int) -> None:
        tensors = await asyncio.to_thread(
            self._source.named_weights
        )  # sharded weights are gathered, which takes a while
        await self._engine.update_weights(version, tensors)
        self._version = version
        self.published_bytes = sum(tensor.numel() * tensor.element_size() for _, tensor in tensors)


class AdaptersOnly:
    """A student's adapters as the weights to publish: engine processes merge them into the base they have loaded."""

    def __init__(self, student: AdapterSource) -> None:
        self._student = student

    def named_weights(self) -> Sequence[tuple[str, Tensor]]:
        return self._student.named_adapters()
