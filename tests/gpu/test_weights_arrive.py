"""New weights reach an engine completely and in time, whatever else the device has queued.

On a GPU the engine decodes on a stream of its own and queues steps ahead, and the kernels that write the weights may
still be queued when `update_weights` is called. The device is delayed here, so that a missing synchronization fails.
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
def _gpu_code_paths_on_the_host(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    if request.node.callspec.params["device"] == "cpu":
        kernels_on_the_host(monkeypatch)
    yield


def delay_device(device: str) -> None:
    """Delays the work queued next on this thread's stream by a tenth of a second."""
    if device == "cuda":
        torch.cuda._sleep(200_000_000)


def student(world: World, device: str) -> PreTrainedModel:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(world.model("qwen3"), dtype=dtype)
    return model.to(device)


def perturbed_weights(model: PreTrainedModel, seed: int) -> Weights:
    """The model's weights, every matrix with noise of a third of its standard deviation; unchanged for seed 0."""
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
    """The number of tokens that the rows in decoding have got from this version so far."""
    batch = engine._scheduler._batch
    return batch.decoding._step if batch is not None and batch.decoding.version == version else 0


@torch.no_grad()
def mismatch(
    folder: Path, weights: Weights, version: int, asked: list[GenerateRequest], written: list[Generation]
) -> float:
    """Mean distance of the engine's logprobs to those of these weights, over the tokens labelled with this version."""
    model = plain_model(folder, {name: tensor.float().cpu() for name, tensor in weights.items()})
    distances = []
    for request, generation in zip(asked, written, strict=True):
        tokens = torch.from_numpy(np.concatenate([request.tokens, generation.tokens])).long()
        logprobs = model(input_ids=tokens[None]).logits[0, :-1].log_softmax(-1)
        own = logprobs.gather(1, tokens[1:, None])[len(request.tokens) - 1 :, 0]
        distance = (own - torch.from_numpy(generation.logprobs)).abs()
        distances.append(distance[torch.from_numpy(generation.weight_versions == version)])
    found = torch.cat(distances)
    assert len(found) >= 10, f"only {len(found)} tokens of version {version}"
    return float(found.mean())


@pytest.mark.parametrize("device", DEVICES)
def test_weights_updated_during_generation_are_used_for_the_following_tokens(
    world: World, device: str
) -> None:
    model = student(world, device)
    versions = [perturbed_weights(model, seed) for seed in range(3)]
    asked = requests(
        16, new=200 if device == "cuda" else 48
    )  # a GPU generates 48 before the loop below has polled twice

    async def body() -> list[Generation]:
        engine = engine_over(student(world, device), device)
        try:
            writing = asyncio.ensure_future(engine.generate(asked))
            for version in (1, 2):
                while steps_of(engine, version - 1) < 6:
                    assert not writing.done()
                    await asyncio.sleep(0.0005)
                delay_device(device)  # the tensors below are not computed yet when `update_weights` is called
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
def test_weights_changed_in_place_are_used_after_a_publish(world: World, device: str) -> None:
    """As in the sync trainer: an optimizer writes into the tensors that both share, then the version is incremented."""
    trained = student(world, device).train()
    versions = [perturbed_weights(trained, seed) for seed in range(3)]
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
        delay_device(device)
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
