"""A vLLM server on another machine: reached through its proxy with a token, updated by broadcast, restarted.

The server is a stand-in with vLLM's routes over a small model. Launcher, proxy and broadcast are the real ones.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import torch
from engine_models import make_model

from understudy.cluster.local import LocalProcesses
from understudy.engines.base import GenerateRequest, Sampling
from understudy.engines.local.engine import HFEngine
from understudy.engines.servers.vllm import VLLMSettings, start_vllm

HERE = Path(__file__).parent
CONTEXT = 64
ASKED = [
    GenerateRequest(f"row-{i}", np.arange(1, 5 + i, dtype=np.int32), Sampling(6, ()), seed=i)
    for i in range(4)
]


class RemoteProcesses(LocalProcesses):
    """Local processes reported as being on other machines."""

    def is_remote(self, name: str) -> bool:
        return True

    def shares_memory(self, name: str) -> bool:
        return False


async def written_by(model: Any) -> list[tuple[list[int], list[float]]]:
    engine = HFEngine(model, max_batch=16, device="cpu", pad_id=0, max_length=CONTEXT)
    try:
        return [
            (g.tokens.tolist(), [round(x, 3) for x in g.logprobs.tolist()])
            for g in [(await engine.generate([one]))[0] for one in ASKED]
        ]
    finally:
        await engine.close()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_remote_vllm_server_gets_every_version_and_is_restarted_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = make_model("llama", 1), make_model("llama", 2)
    first.save_pretrained(tmp_path / "student")
    paths = [str(HERE / "fake_vllm"), str(HERE), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    env = {"OMP_NUM_THREADS": "1"}
    settings = VLLMSettings(sys.executable, str(tmp_path / "student"), CONTEXT, 16, "float32", env=(env,))

    async def body() -> None:
        processes = RemoteProcesses(tmp_path / "logs", start_timeout=120)
        engine = await start_vllm(settings, processes, version=0, timeout_s=100)
        try:
            (child,) = engine.children.values()
            url = child.ready["url"]
            assert "socket" not in child.ready and url.startswith("http://127.0.0.1:")
            async with httpx.AsyncClient(base_url=url) as stranger:
                for path in ("/collective_rpc", "/v1/weights", "/inference/v1/generate", "/pause"):
                    assert (await stranger.post(path, json={})).status_code == 401, path
                assert (await stranger.get("/health")).status_code == 200

            async def check(model: Any, version: int) -> None:
                found = await engine.generate(ASKED)
                written = [(g.tokens.tolist(), [round(x, 3) for x in g.logprobs.tolist()]) for g in found]
                assert written == await written_by(model)
                assert {v for g in found for v in g.weight_versions.tolist()} == {version}

            await check(first, 0)
            assert await written_by(first) != await written_by(second)
            for version, model in ((1, second), (2, first), (3, second)):
                await engine.update_weights(version, list(model.state_dict().items()))
                await check(model, version)
            with torch.no_grad():
                for tensor in second.parameters():
                    tensor.zero_()  # a restarted server must get the weights as they were sent
            os.kill(child.ready["server"], signal.SIGKILL)
            await check(make_model("llama", 2), 3)
            assert engine.children["replica-0"].ready["pid"] != child.ready["pid"]
            pids = [one.ready["server"] for one in (child, *engine.children.values())]
        finally:
            await engine.close()
            await processes.close()
        assert not [pid for pid in pids if psutil.pid_exists(pid)]
        left = [folder for folder in Path("/dev/shm").glob("understudy-weights-*") if _is_mine(folder)]
        assert not left, "snapshots must be deleted"

    asyncio.run(asyncio.wait_for(body(), 200))


def _is_mine(folder: Path) -> bool:
    return any(folder.rglob("v[1-3].safetensors"))
