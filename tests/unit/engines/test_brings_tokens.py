"""Which servers rollout workers on other machines ask themselves."""

import asyncio

import pytest

from understudy.config import parse_recipe
from understudy.engines.replicas import Endpoint
from understudy.engines.servers.dialects import DIALECTS
from understudy.engines.servers.engine import RemoteEngine
from understudy.trainers.remote_rows.rollouts import brings_tokens


@pytest.mark.parametrize(
    ("urls", "brings"),
    [
        (["http://10.0.0.7:8000"], True),
        (["http://vllm.example:8000", "http://10.0.0.8:8000"], True),
        (["http://10.0.0.7:8000", "http://localhost:8000"], False),
        (["http://127.0.0.1:8000"], False),
        (["http://[::1]:8000"], False),
    ],
)
def test_a_server_of_this_machine_alone_is_asked_by_the_trainer(urls: list[str], brings: bool) -> None:
    recipe = parse_recipe(
        {
            "student": {"model": "s"},
            "teachers": {"t": {"model": "m"}},
            "data": {"train": "d.jsonl"},
            "rollout": {"engine": "vllm", "urls": urls},
        }
    )

    async def body() -> bool:
        engine = RemoteEngine(
            DIALECTS["vllm"], [Endpoint(url) for url in urls], model="student", max_length=64
        )
        try:
            return brings_tokens(recipe, engine)
        finally:
            await engine.close()

    assert asyncio.run(body()) is brings
