"""The proxy of a vLLM server while weights change."""

import asyncio
import time
from pathlib import Path

import httpx
import pytest
import uvicorn
from engine_contract import requests, until
from engines_under_contract import CONTEXT, make_model
from starlette.applications import Starlette
from wire_servers import WireServer

from understudy.engines.base import Sampling
from understudy.engines.local.scheduler import Scheduler
from understudy.engines.servers import engine as engine_module
from understudy.engines.servers.continuation import PAUSED
from understudy.engines.servers.dialects import DIALECTS
from understudy.engines.servers.engine import RemoteEngine
from understudy.engines.servers.vllm_proxy import VLLMProxy
from understudy.serving.endpoint import Endpoint


def test_the_proxy_sends_requests_back_at_once_while_the_server_is_paused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn, turns_of_both = Scheduler._turn, []

    def slow_turn(self: Scheduler) -> None:
        """Decodes one token per row, slowly enough that the pause comes before the last one."""
        turn(self)
        if self._batch is not None and self._batch.decoding.alive == 2:
            turns_of_both.append(True)
        time.sleep(0.003)

    monkeypatch.setattr(Scheduler, "_turn", slow_turn)

    async def body() -> None:
        server = WireServer("vllm", make_model(), CONTEXT)
        socket = str(tmp_path / "socket")
        vllm = uvicorn.Server(
            uvicorn.Config(Starlette(routes=server.routes), uds=socket, log_level="error", lifespan="off")
        )
        proxy = VLLMProxy(socket, token="t0ken", address="127.0.0.1")
        front = uvicorn.Server(
            uvicorn.Config(proxy.asgi, host="127.0.0.1", port=0, log_level="error", lifespan="off")
        )
        serving = [asyncio.create_task(one.serve()) for one in (vllm, front)]
        while not (vllm.started and front.started):
            await asyncio.sleep(0.01)
        url = f"http://127.0.0.1:{front.servers[0].sockets[0].getsockname()[1]}"
        engine = RemoteEngine(
            DIALECTS["vllm"], [Endpoint(url, token="t0ken")], model="student", max_length=CONTEXT, version=0,
            snapshots=tmp_path, timeout_s=10,
        )  # fmt: skip
        long = asyncio.create_task(engine.generate(requests(2, Sampling(CONTEXT - 20))))
        await until(lambda: turns_of_both)
        assert len(server.bodies) == 2
        await engine.pause()
        headers = {"Authorization": "Bearer t0ken"}
        async with httpx.AsyncClient(base_url=url, headers=headers) as late:
            sent_back = await late.post("/inference/v1/generate", json=server.bodies[0], timeout=2)
        assert sent_back.status_code == PAUSED and len(server.bodies) == 2
        began = time.monotonic()
        await engine.update_weights(1, list(make_model(seed=1).named_parameters()))
        assert time.monotonic() - began < engine_module.QUIET_S, "the update must not wait for a timeout"
        await engine.resume()
        for one in await long:
            assert len(one.tokens) == CONTEXT - 20 and set(one.weight_versions.tolist()) == {0, 1}
        assert engine._replicas.all[0].failures == 0
        await engine.close()
        await proxy.close()
        await server.engine.close()
        vllm.should_exit = front.should_exit = True
        await asyncio.gather(*serving)

    asyncio.run(asyncio.wait_for(body(), 60))
