"""New weights reach the engine with the right version."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from understudy.errors import EngineError
from understudy.weights.publish import CopiedWeights, SharedWeights, WeightPublisher


def weights_of(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def model(value: float = 1.0) -> nn.Module:
    tied = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    tied[1].weight = tied[0].weight
    with torch.no_grad():
        tied[0].weight.fill_(value)
    return tied


class Receiver:
    """An engine that stores the weights it receives."""

    def __init__(self) -> None:
        self.own = model(0.0)
        self.version = -1

    def share_parameters_with(self, trained: nn.Module) -> None:
        self.own = trained

    async def update_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            self.own.get_parameter(name).data.copy_(tensor)
        self.version = version


def test_shared_weights_use_the_memory_of_the_trained_model() -> None:
    trained, engine = model(), Receiver()
    publisher: WeightPublisher = SharedWeights(trained, engine)
    assert (publisher.version, engine.version) == (-1, -1)
    trained[0].weight.data.fill_(7.0)
    asyncio.run(publisher.publish(3))
    assert (publisher.version, engine.version) == (3, 3)
    assert engine.own[0].weight.data_ptr() == trained[0].weight.data_ptr()


def test_copied_weights_change_only_on_publish() -> None:
    trained, engine = model(), Receiver()
    publisher: WeightPublisher = CopiedWeights(partial(weights_of, trained), engine)
    asyncio.run(publisher.publish(1))
    trained[0].weight.data.fill_(7.0)
    assert engine.own[0].weight[0, 0] == 1.0
    asyncio.run(publisher.publish(2))
    assert engine.own[0].weight[0, 0] == 7.0 and engine.version == 2


def test_a_failed_publish_keeps_the_old_version() -> None:
    class Broken(Receiver):
        async def update_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
            raise EngineError("gone")

    publisher = CopiedWeights(partial(weights_of, model()), Broken())
    with pytest.raises(EngineError, match="gone"):
        asyncio.run(publisher.publish(1))
    assert publisher.version == -1
