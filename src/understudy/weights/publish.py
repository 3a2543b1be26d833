"""Publishing to an engine that lives in the trainer's own process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from torch import Tensor, nn

from understudy.weights.base import AdapterSource, SharingReceiver, WeightReceiver, WeightSource


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
