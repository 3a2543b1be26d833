"""Publishers: make the trained weights available to an engine, shared, copied or as adapters only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from torch import Tensor, nn

NamedTensors = Iterable[tuple[str, Tensor]]


class WeightPublisher(Protocol):
    """Delivers the trained weights to the engines. The trainer calls it after an update."""

    @property
    def version(self) -> int:
        """The last version published; −1 before the first."""
        ...

    async def publish(self, version: int) -> None:
        """Publishes the current weights as `version`; versions grow, except on a return to a checkpoint."""
        ...


class WeightReceiver(Protocol):
    """An engine, as a publisher sees it."""

    async def update_weights(self, version: int, tensors: NamedTensors) -> None:
        """Takes the weights over; no tensors means that the receiver shares the trained ones."""
        ...


class SharingReceiver(WeightReceiver, Protocol):
    """An engine in this process that can generate with the trained tensors themselves."""

    def share_parameters_with(self, model: nn.Module) -> None: ...


class SharedWeights:
    """A publisher for an engine that shares the policy's tensors: `publish` only changes the version.

    For the sync trainer, where no generation runs during an optimizer step. If both run at once, a
    generation could see half a step: use `CopiedWeights` then.
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
    """A publisher for an engine with its own tensors: each version is copied in between two decode steps.

    `read` returns the tensors by the model's own names, a tied one once: a policy's `named_weights`, or its
    `named_adapters` for engines that merge adapters (`adapters.py`).
    """

    def __init__(self, read: Callable[[], Sequence[tuple[str, Tensor]]], engine: WeightReceiver) -> None:
        self._read = read
        self._engine = engine
        self._version = -1
        self.published_bytes = 0
        """Bytes of the last version, as sent to each engine."""

    @property
    def version(self) -> int:
        return self._version

    async def publish(self, version: int) -> None:
        tensors = await asyncio.to_thread(self._read)  # gathering sharded weights takes a while
        await self._engine.update_weights(version, tensors)
        self._version = version
        self.published_bytes = sum(tensor.numel() * tensor.element_size() for _, tensor in tensors)
