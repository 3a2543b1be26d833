"""The same contract over a real vLLM: one server for all checks, because it takes a minute to start."""

import asyncio
from pathlib import Path

import pytest
from engine_contract import CHECKS, CONTROL_CHECKS, a_live_update_splits_generations_by_version
from engines_under_contract import VLLM_PYTHON, make_model, real_vllm


@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    not VLLM_PYTHON, reason="set UNDERSTUDY_VLLM_PYTHON to the interpreter of an environment with vLLM"
)
def test_vllm_keeps_the_contract(tmp_path: Path) -> None:
    async def body() -> None:
        async with real_vllm(make_model(), tmp_path) as engine:
            for check in (*CHECKS, *CONTROL_CHECKS):
                print(check.__name__)
                await asyncio.wait_for(check(engine, make_model()), 120)
            await a_live_update_splits_generations_by_version(engine, make_model(), make_model(seed=1))

    asyncio.run(body())
