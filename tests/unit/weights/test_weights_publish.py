"""New weights reach the engine whole, under the right version."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from understudy.errors import EngineError
from understudy.weights.base import ModelWeights, WeightPublisher
from understudy.weights.disk import DiskWeights, current_snapshot
from understudy.weights.in_process import CopiedWeights, SharedWeights


def model(value: float = 1.0) -> nn.Module:
    tied = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    tied[1].weight = tied[0].weight
    with torch.no_grad():
        tied[0].weight.fill_(value)
    return tied


class Receiver:
    """An engine that keeps what it is given."""

    def __init__(self) -> None:
        self.own = model(0.0)
        self.version = -1

    def share_parameters_with(self, trained: nn.Module) -> None:
        self.own = trained

    async def update_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            self.own.get_parameter(name).data.copy_(tensor)
        self.version = version


def test_shared_weights_are_the_same_memory() -> None:
    trained, engine = model(), Receiver()
    publisher: WeightPublisher = SharedWeights(trained, engine)
    assert (publisher.version, engine.version) == (-1, -1)
    trained[0].weight.data.fill_(7.0)
    asyncio.run(publisher.publish(3))
    assert (publisher.version, engine.version) == (3, 3)
    assert engine.own[0].weight.data_ptr() == trained[0].weight.data_ptr()


def test_copied_weights_change_only_on_publish() -> None:
    trained, engine = model(), Receiver()
    publisher: WeightPublisher = CopiedWeights(ModelWeights(trained), engine)
    asyncio.run(publisher.publish(1))
    trained[0].weight.data.fill_(7.0)
    assert engine.own[0].weight[0, 0] == 1.0
    asyncio.run(publisher.publish(2))
    assert engine.own[0].weight[0, 0] == 7.0 and engine.version == 2


def test_a_failed_publish_keeps_the_old_version() -> None:
    class Broken(Receiver):
        async def update_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
            raise EngineError("gone")

    publisher = CopiedWeights(ModelWeights(model()), Broken())
    with pytest.raises(EngineError, match="gone"):
        asyncio.run(publisher.publish(1))
    assert publisher.version == -1


def test_disk_snapshots_are_complete_announced_and_pruned(tmp_path: Path) -> None:
    base, root = tmp_path / "base", tmp_path / "snapshots"
    base.mkdir()
    (base / "config.json").write_text("{}")
    trained, heard = model(), []

    async def announce(version: int, folder: Path) -> None:
        assert current_snapshot(root) == (version, folder)
        heard.append((version, load_file(folder / "model.safetensors")["0.weight"][0, 0].item()))

    (root / ".tmp-version-000000").mkdir(parents=True)
    publisher: WeightPublisher = DiskWeights(ModelWeights(trained), root, base, announce, keep=2)
    assert current_snapshot(root) is None

    async def run() -> None:
        for version in (1, 2, 3):
            trained[0].weight.data.fill_(float(version))
            await publisher.publish(version)

    asyncio.run(run())
    assert heard == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert sorted(path.name for path in root.iterdir()) == ["current", "version-000002", "version-000003"]
    assert (root / "version-000003" / "config.json").read_text() == "{}"
    assert publisher.version == 3


def test_disk_publish_after_a_return_to_an_earlier_version(tmp_path: Path) -> None:
    trained = model()
    publisher = DiskWeights(ModelWeights(trained), tmp_path, keep=2)

    async def run() -> None:
        for version in (4, 5, 2):
            await publisher.publish(version)

    asyncio.run(run())
    assert current_snapshot(tmp_path) == (2, tmp_path / "version-000002")
    assert (tmp_path / "version-000002" / "model.safetensors").is_file()


def test_an_unwritable_folder_is_a_clear_error(tmp_path: Path) -> None:
    publisher = DiskWeights(ModelWeights(model()), tmp_path / "snapshots")
    (tmp_path / "snapshots").rmdir()
    with pytest.raises(EngineError, match="version 1 could not be written"):
        asyncio.run(publisher.publish(1))
    assert publisher.version == -1
