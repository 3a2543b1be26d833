"""The engine contract for a real SGLang. All checks share one server, because it takes a minute to start."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from engine_contract import (
    CANDIDATE_CHECKS,
    CHECKS,
    CONTROL_CHECKS,
    check_a_live_update_splits_generations_by_version,
)
from engines_under_contract import CONTEXT, make_model
from real_servers import serving_sglang

from understudy.engines.servers.dialects import DIALECTS
from understudy.engines.servers.engine import RemoteEngine
from understudy.serving.endpoint import Endpoint

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]

KEY = "secret"
OTHERWISE = {
    "check_logprobs_under_top_k_are_of_the_filtered_distribution",  # SGLang reports them unfiltered; recipes refuse it
    "check_the_same_seed_repeats_the_same_tokens",  # SGLang ignores seeds without --enable-deterministic-inference
}
KEPT = [check for check in (*CHECKS, *CANDIDATE_CHECKS, *CONTROL_CHECKS) if check.__name__ not in OTHERWISE]


@pytest.fixture(scope="module")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("sglang")
    make_model().save_pretrained(folder / "student")
    with serving_sglang(
        folder / "student", folder / "log.txt", ["--skip-tokenizer-init", "--api-key", KEY]
    ) as url:
        yield url


@asynccontextmanager
async def engine_at(url: str, folder: Path) -> AsyncIterator[RemoteEngine]:
    engine = RemoteEngine(
        DIALECTS["sglang"],
        [Endpoint(url, KEY)],
        model="student",
        max_length=CONTEXT,
        version=0,
        snapshots=folder,
        timeout_s=60,
    )
    yield engine
    await engine.close()


@pytest.mark.parametrize("check", KEPT, ids=lambda check: check.__name__)
def test_contract(check: Callable[..., Any], sglang: str, tmp_path: Path) -> None:
    async def body() -> None:
        async with engine_at(sglang, tmp_path) as engine:
            await check(engine, make_model())

    asyncio.run(asyncio.wait_for(body(), 200))


def test_live_update(sglang: str, tmp_path: Path) -> None:
    async def body() -> None:
        async with engine_at(sglang, tmp_path) as engine:
            await check_a_live_update_splits_generations_by_version(engine, make_model(), make_model(seed=1))

    asyncio.run(asyncio.wait_for(body(), 400))
