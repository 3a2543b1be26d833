"""The engine contract for a real vLLM. All checks share one server, because it takes a minute to start."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from engine_contract import (
    CANDIDATE_CHECKS,
    CHECKS,
    CONTROL_CHECKS,
    check_a_live_update_splits_generations_by_version,
    forced,
    requests,
)
from engines_under_contract import VLLM_PYTHON, make_model, real_vllm
from hosted_rig import RemoteProcesses

from understudy.cluster.local import LocalProcesses
from understudy.engines.base import Sampling
from understudy.engines.servers.vllm import VLLMEngine


@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    not VLLM_PYTHON, reason="set UNDERSTUDY_VLLM_PYTHON to the interpreter of an environment with vLLM"
)
@pytest.mark.parametrize("launcher", [LocalProcesses, RemoteProcesses], ids=["socket", "proxy"])
def test_vllm_meets_the_engine_contract(tmp_path: Path, launcher: type[LocalProcesses]) -> None:
    """Over vLLM's Unix socket, and over the proxy through which a server on another machine is reached."""

    async def body() -> None:
        async with real_vllm(make_model(), tmp_path, launcher) as engine:
            for check in (*CHECKS, *CANDIDATE_CHECKS, *CONTROL_CHECKS):
                await asyncio.wait_for(check(engine, make_model()), 120)
            new = make_model(seed=1)
            await check_a_live_update_splits_generations_by_version(engine, make_model(), new)
            await check_a_killed_server_is_restarted_with_the_newest_weights(engine, new)

    asyncio.run(body())


async def check_a_killed_server_is_restarted_with_the_newest_weights(engine: VLLMEngine, new: Any) -> None:
    (child,) = engine.children.values()
    server = psutil.Process(child.ready.get("server", child.ready["pid"]))
    os.kill(child.ready["pid"], signal.SIGKILL)
    asked = requests(3, Sampling(10))
    written = await asyncio.wait_for(engine.generate(asked), 400)
    assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE, (
        "the server must end with its parent process"
    )
    for request, generation in zip(asked, written, strict=True):
        assert set(generation.weight_versions.tolist()) == {1}
        np.testing.assert_allclose(generation.logprobs, forced(new, request, generation), atol=2e-4)
