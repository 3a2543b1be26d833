"""Engine processes without memory shared with the trainer: weights come by broadcast, and no death blocks a publish."""

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_contract import check_a_live_update_splits_generations_by_version
from engines_under_contract import hf_composed, make_model
from hosted_rig import RemoteProcesses, hosted
from test_engine_contract_hosted import assert_same_bits, mixed_batch

from understudy.engines.hosted.engine import HostedEngine
from understudy.weights.broadcast import PackedWeights

BATCHES = [mixed_batch(seed) for seed in range(6)]


def new_weights(seed: int) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor.detach()) for name, tensor in make_model(seed=seed).named_parameters()]


def on_bucket(monkeypatch: pytest.MonkeyPatch, index: int, action: Any) -> None:
    """Calls `action` once, when the bucket with this index is about to be sent."""
    original, done = PackedWeights.flat, []

    def flat(self: PackedWeights, place: int) -> torch.Tensor:
        if place == index and not done:
            done.append(True)
            action()
        return original(self, place)

    monkeypatch.setattr(PackedWeights, "flat", flat)


async def same_bits(inside: Any, outside: HostedEngine) -> None:
    answers = await asyncio.gather(*(outside.generate(batch) for batch in BATCHES))
    for batch, answer in zip(BATCHES, answers, strict=True):
        assert_same_bits(answer, await inside.generate(batch))


@pytest.mark.slow
def test_broadcast_engines_give_the_bits_of_the_in_process_engine_over_updates_and_kills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two remote hosts and a local one. A host killed in the middle of a publish is left out; the others get it."""

    async def body() -> None:
        torch.set_num_threads(1)
        processes = RemoteProcesses(tmp_path / "logs", local=["rollout-2"])
        async with (
            hf_composed(make_model(), tmp_path) as inside,
            hosted(make_model(), tmp_path, hosts=3, processes=processes) as (outside, _),
        ):
            outside._delivery._bucket_bytes = 2048

            def kill(name: str, number: signal.Signals = signal.SIGKILL) -> None:
                os.kill(processes.children[name].ready["pid"], number)

            for version in (7, 8):  # the second reuses the process group of the first
                for engine in (inside, outside):
                    await engine.update_weights(version, new_weights(version))
                await same_bits(inside, outside)
            assert outside._delivery._groups == 1 and len(outside._delivery._packed.buckets) > 3
            on_bucket(monkeypatch, 2, lambda: kill("rollout-1"))
            began = time.monotonic()
            for engine in (inside, outside):
                await engine.update_weights(9, new_weights(9))
            assert time.monotonic() - began < 20 and set(outside._restarting) == {"replica-1"}
            await same_bits(inside, outside)
            while outside._restarting:
                await asyncio.sleep(0.05)
            kill(
                "rollout-2"
            )  # hosts change between shared memory and broadcast, so the weights are packed again
            processes.local = ["rollout-0"]
            kill("rollout-0")
            await asyncio.sleep(0.1)
            await same_bits(inside, outside)
            while outside._restarting:
                await asyncio.sleep(0.05)
            await same_bits(inside, outside)
            for engine in (inside, outside):
                await engine.update_weights(10, new_weights(10))
            await same_bits(inside, outside)

    asyncio.run(asyncio.wait_for(body(), 200))


@pytest.mark.slow
def test_a_host_frozen_during_a_publish_is_left_out_after_the_stall_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        processes = RemoteProcesses(tmp_path / "logs")
        async with (
            hf_composed(make_model(), tmp_path) as inside,
            hosted(make_model(), tmp_path, hosts=2, processes=processes) as (outside, _),
        ):
            torch.set_num_threads(1)
            outside._delivery._bucket_bytes, outside._delivery._stall_s = 2048, 3.0
            await check_a_live_update_splits_generations_by_version(outside, make_model(), make_model(seed=1))
            pid = processes.children["rollout-1"].ready["pid"]
            on_bucket(monkeypatch, 1, lambda: os.kill(pid, signal.SIGSTOP))
            began = time.monotonic()
            for engine in (inside, outside):
                await engine.update_weights(2, new_weights(2))
            assert 1 < time.monotonic() - began < 30
            assert outside.version == 2 and set(outside._restarting) == {"replica-1"}
            await same_bits(inside, outside)

    asyncio.run(asyncio.wait_for(body(), 200))
