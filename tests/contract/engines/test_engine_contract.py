"""The engine contract for the in-process engine in both batchings and the remote engine over each wire format."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from engine_contract import (
    CANDIDATE_CHECKS,
    CHECKS,
    CONTROL_CHECKS,
    check_a_live_update_splits_generations_by_version,
    requests,
    widening_pauses,
)
from engines_under_contract import CONTEXT, ENGINES, make_model

from understudy.engines.base import Sampling
from understudy.errors import EngineError
from understudy.types.trajectory import StopReason


@pytest.mark.parametrize("check", [*CHECKS, *CONTROL_CHECKS], ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", ENGINES)
def test_contract(name: str, check: Any, tmp_path: Path) -> None:
    async def body() -> None:
        async with ENGINES[name](make_model(), tmp_path) as engine:
            await check(engine, make_model())

    asyncio.run(asyncio.wait_for(body(), 60))


@pytest.mark.parametrize("name", [name for name in ENGINES if name != "openai-wire"])
def test_live_update(name: str, tmp_path: Path) -> None:
    async def body() -> None:
        async with ENGINES[name](make_model(), tmp_path) as engine:
            await check_a_live_update_splits_generations_by_version(engine, make_model(), make_model(seed=1))

    asyncio.run(asyncio.wait_for(body(), 60))


@pytest.mark.parametrize("check", CANDIDATE_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", [name for name in ENGINES if name != "openai-wire"])
def test_candidates_contract(name: str, check: Any, tmp_path: Path) -> None:
    test_contract(name, check, tmp_path)


def test_candidates_of_a_changed_distribution_are_refused(tmp_path: Path) -> None:
    async def body() -> None:
        for name, sampling in (
            ("openai-wire", Sampling(4, candidates=3)),
            ("vllm-wire", Sampling(4, candidates=3, top_p=0.9)),
        ):
            async with ENGINES[name](make_model(), tmp_path) as engine:
                with pytest.raises(EngineError, match="cannot report the model's own candidates"):
                    await engine.generate(requests(1, sampling))

    asyncio.run(body())


def test_update_weights_is_refused_by_an_openai_server(tmp_path: Path) -> None:
    async def body() -> None:
        async with ENGINES["openai-wire"](make_model(), tmp_path) as engine:
            with pytest.raises(EngineError, match="openai cannot take new weights"):
                await engine.update_weights(1, make_model(seed=1).named_parameters())
            assert engine.version == 0

    asyncio.run(body())


def test_an_abort_during_a_pause_returns_the_tokens_generated_before_it(tmp_path: Path) -> None:
    async def body() -> None:
        async with ENGINES["vllm-wire"](make_model(), tmp_path) as engine:
            for pause in widening_pauses():
                writing = asyncio.create_task(engine.generate(requests(2, Sampling(CONTEXT - 20))))
                await asyncio.sleep(pause)
                await engine.pause()
                await engine.abort()
                written = await writing
                await engine.resume()
                for one in written:
                    whole = len(one.tokens) == CONTEXT - 20
                    assert one.stop_reason is (StopReason.LENGTH if whole else StopReason.ABORTED)
                if all(0 < len(one.tokens) < CONTEXT - 20 for one in written):
                    return

    asyncio.run(asyncio.wait_for(body(), 60))
