"""From `[rollout]` to an engine: sampling, servers, and how new weights are published to it."""

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from understudy.assembly.engines import (
    FixedWeights,
    context_of,
    open_engine,
    publisher_of,
    sampling_of,
    vllm_settings,
)
from understudy.assets import quickstart_model
from understudy.config import parse_recipe
from understudy.engines.base import Engine, GenerateRequest, Sampling
from understudy.engines.local.engine import HFEngine
from understudy.engines.servers.engine import RemoteEngine
from understudy.errors import ConfigError
from understudy.planning.resolved import EngineSettings, resolve
from understudy.trainers.models import LoadedModel, load_model
from understudy.weights.publish import CopiedWeights, SharedWeights


class Silent:
    def phase(self, text: str) -> None: ...

    def note(self, text: str) -> None: ...


class PolicyStub:
    """A policy as publishers see it."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def named_weights(self) -> list[tuple[str, Any]]:
        return list(self.model.named_parameters())


@pytest.fixture(scope="module")
def student() -> LoadedModel:
    return load_model(str(quickstart_model("student")), device="cpu")


def settings(loss: dict | None = None, **rollout: Any) -> EngineSettings:
    recipe = parse_recipe(
        {
            "student": {"model": "s"},
            "teachers": {"t": {"model": "m"}},
            "data": {"train": "d.jsonl"},
            "loss": loss or {},
            "rollout": rollout,
        }
    )
    return resolve(recipe, gpus=0).engine


def open_now(given: EngineSettings, student: LoadedModel) -> Engine:
    return asyncio.run(open_engine(given, student, None, Silent()))  # type: ignore[arg-type]


def test_every_sampling_key_reaches_the_engine(student: LoadedModel) -> None:
    given = settings(
        {"signal": "at_ids", "kind": "reverse_kl", "topk": 5}, max_new_tokens=7, temperature=0.5, top_p=0.9,
        top_k=3, min_p=0.1, repetition_penalty=1.2, stop=["=", "++"],
    )  # fmt: skip
    assert sampling_of(given, student) == Sampling(
        7, student.stop_ids, 0.5, 0.9, 3, 0.1, 1.2, ("=", "++"), candidates=5
    )
    assert sampling_of(settings(), student).candidates == 0


def test_the_local_engine_stops_at_the_first_stop_string(student: LoadedModel) -> None:
    async def written() -> str:
        engine = await open_engine(replace(settings(), deterministic=False), student, None, Silent())  # type: ignore[arg-type]
        try:
            prompt = torch.tensor(student.tokenizer.encode("12+34=")).numpy().astype("int32")
            asked = GenerateRequest("x", prompt, Sampling(40, stop_strings=("7", "a", "5")), seed=3)
            (generation,) = await engine.generate([asked])
            assert generation.stop_reason == "stop_string"
            return str(student.tokenizer.decode(generation.tokens.tolist()))
        finally:
            await engine.close()

    text = asyncio.run(written())
    assert text[-1] in "7a5" and not set(text[:-1]) & set("7a5")


def test_the_local_engine_shares_the_trained_tensors_only_if_its_settings_say_so(
    student: LoadedModel,
) -> None:
    policy = PolicyStub(student.model)
    for shared, kind in ((True, SharedWeights), (False, CopiedWeights)):
        given = replace(settings(), shares_tensors=shared)
        engine = open_now(given, student)
        assert isinstance(engine, HFEngine)
        assert isinstance(publisher_of(given, policy, engine), kind)
        pointers = {parameter.data_ptr() for parameter in student.model.parameters()}
        own = {parameter.data_ptr() for parameter in engine._model.parameters()}
        assert bool(pointers & own) is shared


def test_servers_with_fixed_weights_stay_at_version_0_after_publishes(student: LoadedModel) -> None:
    given = settings(engine="openai", urls=["http://127.0.0.1:1/"], live_weights=False)

    async def body() -> None:
        engine = await open_engine(given, student, None, Silent())  # type: ignore[arg-type]
        publisher = publisher_of(given, PolicyStub(student.model), engine)
        assert isinstance(engine, RemoteEngine) and isinstance(publisher, FixedWeights)
        for version in (0, 1, 2):
            await publisher.publish(version)
        assert engine.version == publisher.version == 0
        await engine.close()

    asyncio.run(body())


def test_a_vllm_server_gets_the_options_and_devices_of_the_recipe(
    student: LoadedModel, tmp_path: Path
) -> None:
    given = settings(
        {"signal": "at_ids", "kind": "reverse_kl", "topk": 30}, engine="vllm", vllm_python=sys.executable,
        replicas=2, devices=["1", "2,3"], engine_args=["--gpu-memory-utilization=0.4"], context_length=96,
    )  # fmt: skip
    server = vllm_settings(given, student, given.rollout.devices)
    assert server.python == sys.executable and server.max_length == 96 == context_of(given, student)
    assert {"--gpu-memory-utilization=0.4", "--max-logprobs=31"} <= set(server.options)
    assert [env["CUDA_VISIBLE_DEVICES"] for env in server.env] == ["1", "2,3"]


def test_a_context_length_beyond_the_students_is_refused(student: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="holds 128 tokens"):
        context_of(settings(context_length=4096), student)
