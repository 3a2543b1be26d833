"""New weights reach an engine whole and in time, whatever else the device has queued.

On a GPU the engine decodes on a stream of its own and queues steps ahead, and what writes the weights may itself still be queued
when `update_weights` is called. The clock of the device is held up on purpose here, so that a missing synchronisation shows.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from device_runs import kernels_on_the_host, plain_model
from device_world import World
from transformers import AutoModelForCausalLM, PreTrainedModel

from understudy.engines.base import GenerateRequest, Generation, Sampling
from understudy.engines.local.engine import HFEngine
from understudy.engines.local.scheduler import Batching
from understudy.nn.pretrained import sharing_copy
from understudy.weights.publish import SharedWeights

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]
Weights = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def _one_way_for_all(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.node.callspec.params["device"] == "cpu":
        kernels_on_the_host(monkeypatch)
    yield


def hold_up(device: str) -> None:
    """A tenth of a second in which what is queued next on this thread's stream waits."""
    if device == "cuda":
        torch.cuda._sleep(200_000_000)


def student(world: World, device: str) -> PreTrainedModel:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(world.model("qwen3"), dtype=dtype)
    return model.to(device)


def shaken(model: PreTrainedModel, seed: int) -> Weights:
    """The model's weights, every matrix moved by a third of its size."""
    generator = torch.Generator().manual_seed(seed)

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        if seed == 0 or tensor.dim() < 2:
            return tensor.detach().clone()
        noise = torch.randn(tensor.shape, generator=generator).to(tensor)
        return tensor.detach() + noise * tensor.detach().float().std().to(tensor) / 3

    return {name: moved(tensor) for name, tensor in model.named_parameters()}


def engine_over(model: PreTrainedModel, device: str) -> HFEngine:
    return HFEngine(
        model, max_batch=16, device=device, pad_id=1, max_length=256, batching=Batching.CONTINUOUS, version=0
    )


def requests(rows: int, new: int) -> list[GenerateRequest]:
    rng = np.random.default_rng(7)
    return [
        GenerateRequest(
            f"{index}",
            rng.integers(100, 1000, int(rng.integers(3, 12))).astype(np.int32),
            Sampling(max_new_tokens=new),
            seed=index,
        )
        for index in range(rows)
    ]


def steps_of(engine: HFEngine, version: int) -> int:
    """Tokens that every row being written has got under this version so far."""
    batch = engine._scheduler._batch
    return batch.decoding._step if batch is not None and batch.decoding.version == version else 0


@torch.no_grad()
def mismatch(
    folder: Path, weights: Weights, version: int, asked: list[GenerateRequest], written: list[Generation]
) -> float:
    """Mean distance to these weights' logprobs, over the tokens that carry this version."""
    model = plain_model(folder, {name: tensor.float().cpu() for name, tensor in weights.items()})
    distances = []
    for request, generation in zip(asked, written, strict=True):
        tokens = torch.from_numpy(np.concatenate([request.tokens, generation.tokens])).long()
        logprobs = model(input_ids=tokens[None]).logits[0, :-1].log_softmax(-1)
        own = logprobs.gather(1, tokens[1:, None])[len(request.tokens) - 1 :, 0]
        far = (own - torch.from_numpy(generation.logprobs)).abs()
        distances.append(far[torch.from_numpy(generation.weight_versions == version)])
    found = torch.cat(distances)
    assert len(found) >= 10, f"only {len(found)} tokens of version {version}"
    return float(found.mean())


@pytest.mark.parametrize("device", DEVICES)
def test_weights_copied_in_midway_split_each_answer_in_two(world: World, device: str) -> None:
    model = student(world, device)
    versions = [shaken(model, seed) for seed in range(3)]
    asked = requests(
        16, new=200 if device == "cuda" else 48
    )  # a GPU writes 48 before a thread has looked twice

    async def body() -> list[Generation]:
        engine = engine_over(student(world, device), device)
        try:
            writing = asyncio.ensure_future(engine.generate(asked))
            for version in (1, 2):
                while steps_of(engine, version - 1) < 6:
                    assert not writing.done()
                    await asyncio.sleep(0.0005)
                hold_up(device)  # the tensors below are not there yet when the engine hears of them
                fresh = [(name, tensor * 1) for name, tensor in versions[version].items()]
                await engine.update_weights(version, fresh)
            return await writing
        finally:
            await engine.close()

    written = asyncio.run(body())
    folder = world.model("qwen3")
    for version in range(3):
        own, other = (
            mismatch(folder, versions[which], version, asked, written)
            for which in (version, (version + 1) % 3)
        )
        assert own < (0.03 if device == "cuda" else 1e-4) and other > 5 * own, (version, own, other)


@pytest.mark.parametrize("device", DEVICES)
def test_weights_written_in_place_are_there_after_a_publish(world: World, device: str) -> None:
    """As the sync trainer does it: an optimizer writes into the tensors both use, then the version is counted up."""
    trained = student(world, device).train()
    versions = [shaken(trained, seed) for seed in range(3)]
    asked = requests(12, new=12)

    async def body() -> list[list[Generation]]:
        engine = engine_over(sharing_copy(trained), device)
        publisher = SharedWeights(trained, engine)
        answers = []
        try:
            for version in range(3):
                await asyncio.to_thread(write, version)
                await publisher.publish(version)
                answers.append(await engine.generate(asked))
            return answers
        finally:
            await engine.close()

    @torch.no_grad()
    def write(version: int) -> None:
        hold_up(device)
        own: dict[str, Any] = dict(trained.named_parameters())
        for name, tensor in versions[version].items():
            own[name].copy_(tensor)

    folder = world.model("qwen3")
    for version, written in enumerate(asyncio.run(body())):
        own, other = (
            mismatch(folder, versions[which], version, asked, written)
            for which in (version, (version + 1) % 3)
        )
        assert own < (0.03 if device == "cuda" else 1e-4) and other > 5 * own, (version, own, other)
    assert trained.training and all(module.training for module in trained.modules())
