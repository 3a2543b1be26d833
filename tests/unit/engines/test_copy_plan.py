"""The copies made by vLLM's weight loader, recorded once and repeated without the loader, as live updates do in
vLLM."""

import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import understudy.engines

SIDE = Path(understudy.engines.__file__).parent / "servers" / "vllm_side"
sys.path.insert(0, str(SIDE))
from understudy_copy_plan import record_copies  # noqa: E402


class Fused(nn.Module):
    """Like vLLM's layers: one matrix for three projections, an embedding with padded rows."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.zeros(12, 4))
        self.embed = nn.Parameter(torch.zeros(8, 4))
        self.calls = 0

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.calls += 1
        for name, tensor in weights:
            if name == "embed":
                self.embed.data[:5].copy_(tensor)
                self.embed.data[5:].fill_(0)
            else:
                place = 4 * "qkv".index(name)
                self.qkv.data.narrow(0, place, 4).copy_(tensor)


class Scaled(Fused):
    """A loader that computes on the way: its copies do not read the trainer's memory."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        super().load_weights((name, 2 * tensor) for name, tensor in weights)


class Forgetful(Fused):
    """A loader that does not set every parameter by a copy."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        super().load_weights((name, tensor) for name, tensor in weights if name != "embed")


def trained_tensors() -> list[tuple[str, Tensor]]:
    torch.manual_seed(0)
    return [*((name, torch.randn(4, 4)) for name in "qkv"), ("embed", torch.randn(5, 4))]


def test_recorded_copies_are_repeated_from_the_trainers_memory_without_the_loader() -> None:
    model, tensors = Fused(), trained_tensors()
    plan = record_copies(model, tensors)
    assert plan.complete and torch.equal(model.qkv[4:8], tensors[1][1])
    for _, tensor in tensors:
        tensor.add_(1)  # an optimizer step, in place
    plan.run()
    assert model.calls == 1
    assert torch.equal(model.qkv.data, torch.cat([tensor for _, tensor in tensors[:3]]))
    assert torch.equal(model.embed.data[:5], tensors[3][1]) and not model.embed.data[5:].any()


@pytest.mark.parametrize("kind", [Scaled, Forgetful])
def test_a_loader_that_does_more_than_copy_runs_every_time(kind: type[Fused]) -> None:
    model, tensors = kind(), trained_tensors()
    plan = record_copies(model, tensors)
    assert not plan.complete
    tensors[0][1].add_(1)
    before = model.qkv.data.clone()
    plan.run()
    assert model.calls == 2 and not torch.equal(before, model.qkv.data)
