"""A server that dies during a publish: the run continues if the server comes back, and fails with the reason if not."""

import asyncio
import resource
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from test_remote import Server, complete_answer, request

from understudy.engines.base import GenerateRequest, Sampling
from understudy.engines.hosted.client import HostChannel
from understudy.engines.hosted.weights import WeightDelivery
from understudy.engines.replicas import EngineReplica
from understudy.engines.servers.continuation import BAD_GATEWAY, PAUSED
from understudy.engines.servers.dialects import DIALECTS
from understudy.engines.servers.engine import NOTHING_NEW_S, RemoteEngine
from understudy.engines.servers.gpu_handover import GpuHandover
from understudy.errors import EngineError
from understudy.weights.snapshots import Snapshots

WEIGHTS = [("w", torch.zeros(2))]


class RestartedServers(RemoteEngine):
    """An engine whose servers are started again when they die."""

    def _report_lost(self, replica: EngineReplica) -> bool:
        self.withdraw(replica.name)
        return True


def with_two_servers(
    kind: type[RemoteEngine],
    folder: Path,
    body: Callable[[RemoteEngine, list[Server]], Awaitable[None]],
    **settings: GpuHandover,
) -> None:
    async def inner() -> None:
        servers = [Server.truthful(), Server.truthful()]
        endpoints = [await server.start() for server in servers]
        engine = kind(
            DIALECTS["vllm"],
            endpoints,
            model="student",
            max_length=64,
            timeout_s=2.0,
            version=0,
            snapshots=folder,
            **settings,
        )
        try:
            await body(engine, servers)
        finally:
            await engine.close()
            for server in servers:
                await server.stop()

    asyncio.run(asyncio.wait_for(inner(), 60))


def test_a_publish_fails_if_a_dead_server_is_not_restarted(tmp_path: Path) -> None:
    async def body(engine: RemoteEngine, servers: list[Server]) -> None:
        await servers[1].stop()
        with pytest.raises(EngineError, match=r"replica-1 \(vllm\): /collective_rpc failed"):
            await engine.update_weights(1, WEIGHTS)
        assert engine.version == 0

    with_two_servers(RemoteEngine, tmp_path, body)


@pytest.mark.parametrize("kind", [RestartedServers, RemoteEngine])
def test_a_server_whose_proxy_answers_502_counts_as_dead(kind: type[RemoteEngine], tmp_path: Path) -> None:
    async def body(engine: RemoteEngine, servers: list[Server]) -> None:
        servers[1].dead_behind_its_proxy = True
        if kind is RemoteEngine:
            with pytest.raises(EngineError, match=r"replica-1 \(vllm\) answered /pause\?mode=abort with 502"):
                await engine.pause()
            return
        await engine.pause()
        assert engine.is_withdrawn("replica-1")
        await engine.resume()
        servers[0].dead_behind_its_proxy = True
        await engine.update_weights(1, WEIGHTS)
        assert engine.version == 1 and engine.is_withdrawn("replica-0")

    with_two_servers(kind, tmp_path, body)


def test_a_restarted_server_gets_the_newest_weights_before_any_request(tmp_path: Path) -> None:
    async def body(engine: RemoteEngine, servers: list[Server]) -> None:
        await servers[1].stop()
        await engine.update_weights(1, WEIGHTS)
        assert engine.version == 1 and engine.is_withdrawn("replica-1")
        servers[1] = Server.truthful()
        await engine.replace("replica-1", await servers[1].start())
        assert servers[1].calls[0] == "/collective_rpc" and not engine.is_withdrawn("replica-1")
        tokens = torch.tensor([3, 4]).numpy().astype("int32")
        await engine.generate([GenerateRequest(str(i), tokens, Sampling(4), i) for i in range(4)])
        assert all(server.bodies for server in servers), "both serve again"
        await engine.pause()
        await engine.resume()

    with_two_servers(RestartedServers, tmp_path, body)


class Loading(Server):
    """Remembers the weights that it was told to load."""

    def __init__(self) -> None:
        super().__init__(lambda body: complete_answer(body, label=self.label))
        self.weight = -1.0

    async def handle(self, request: Request) -> Response:
        if request.url.path == "/collective_rpc":
            path, _ = (await request.json())["args"]
            self.weight = load_file(path)["w"][0].item()
        return await super().handle(request)


@pytest.mark.parametrize("published", [0, 1, 2])
def test_a_restarted_server_gets_the_weights_published_while_all_servers_were_gone(
    published: int, tmp_path: Path
) -> None:
    async def inner() -> None:
        server = Loading()
        engine = RestartedServers(
            DIALECTS["vllm"], [await server.start()], model="student", max_length=64, snapshots=tmp_path
        )
        try:
            for version in range(published):
                await engine.update_weights(version, [("w", torch.full((2,), float(version)))])
            await server.stop()
            engine.withdraw("replica-0")
            await engine.update_weights(published, [("w", torch.full((2,), float(published)))])
            server = Loading()
            await engine.replace("replica-0", await server.start())
            assert (server.weight, server.label) == (published, str(published))
        finally:
            await engine.close()
            await server.stop()

    asyncio.run(asyncio.wait_for(inner(), 60))


def test_a_restarted_remote_server_gets_the_weights_last_published(tmp_path: Path) -> None:
    """The broadcast is replaced by a stand-in that records what it sends."""
    gave: list[tuple[int, float]] = []

    class Counting(WeightDelivery):
        async def give(self, version: int, host: HostChannel) -> None:
            assert self._packed is not None
            gave.append((version, dict(self._packed.tensors())["w"][0].item()))

    async def inner() -> None:
        server = Server.truthful()
        endpoint = replace(await server.start(), shares_memory=False)
        engine = RestartedServers(DIALECTS["vllm"], [endpoint], model="student", max_length=64)
        engine._delivery._broadcast = Counting(Snapshots(0, tmp_path))
        try:
            engine.withdraw("replica-0")
            for version in range(2):
                await engine.update_weights(version, [("w", torch.full((2,), float(version)))])
            await engine.replace("replica-0", endpoint)
            assert gave == [(1, 1.0)] and server.label == "1"
        finally:
            await engine.close()
            await server.stop()

    asyncio.run(asyncio.wait_for(inner(), 60))


def test_a_restarted_server_without_the_last_published_weights_stays_withdrawn(tmp_path: Path) -> None:
    async def body(engine: RemoteEngine, servers: list[Server]) -> None:
        await engine.update_weights(1, WEIGHTS)
        engine.withdraw("replica-1")
        engine._delivery._newest = None
        with pytest.raises(EngineError, match=r"replica-1 .* weights of version None; expected 1"):
            await engine.replace("replica-1", engine._replica("replica-1").endpoint)
        assert engine.is_withdrawn("replica-1")

    with_two_servers(RestartedServers, tmp_path, body)


class Pausing(Server):
    """Like a server behind our proxy: while paused it rejects requests for tokens at once."""

    def __init__(self) -> None:
        super().__init__(lambda body: complete_answer(body, label=self.label))
        self.paused, self.loses_weights, self.sent_back = False, False, 0

    async def handle(self, request: Request) -> Response:
        path = request.url.path
        self.paused = path == "/pause" or (self.paused and path != "/resume")
        if path == "/collective_rpc" and self.loses_weights:
            self.loses_weights = False
            return JSONResponse({"error": "lost"}, status_code=BAD_GATEWAY)
        if path == "/inference/v1/generate" and self.paused:
            self.sent_back += 1
            return JSONResponse({"error": "weights change"}, status_code=PAUSED)
        return await super().handle(request)


def test_a_server_lost_during_a_publish_is_resumed_when_it_is_back_unless_the_engine_is_paused(
    tmp_path: Path,
) -> None:
    async def inner() -> None:
        servers = [Pausing(), Pausing()]
        endpoints = [await server.start() for server in servers]
        engine = RestartedServers(
            DIALECTS["vllm"], endpoints, model="student", max_length=64, version=0, snapshots=tmp_path
        )

        async def slow(body: dict[str, Any]) -> Any:
            await asyncio.sleep(0.2)
            return complete_answer(body, label=servers[0].label)

        try:
            servers[0].answer = slow  # a request in flight, so that the publish tells the servers to pause
            writing = asyncio.create_task(engine.generate([request(session="first")]))
            while not servers[0].bodies:
                await asyncio.sleep(0.005)
            servers[1].loses_weights = True
            await engine.update_weights(1, WEIGHTS)
            await writing
            assert engine.is_withdrawn("replica-1") and servers[1].paused
            await engine.pause()
            await engine.replace("replica-1", endpoints[1])
            assert servers[1].paused, "the engine is paused"
            await engine.resume()
            assert not servers[1].paused
            servers[1].paused = True
            await engine.replace("replica-1", endpoints[1])
            assert not servers[1].paused
        finally:
            await engine.close()
            for server in servers:
                await server.stop()

    asyncio.run(asyncio.wait_for(inner(), 60))


def test_requests_to_a_paused_server_are_repeated_with_pauses_between_them(tmp_path: Path) -> None:
    async def inner() -> None:
        server = Pausing()
        engine = RestartedServers(
            DIALECTS["vllm"], [await server.start()], model="student", max_length=64, version=0
        )
        try:
            server.paused = True
            writing = asyncio.create_task(engine.generate([request()]))
            await asyncio.sleep(1.0)
            assert 1 <= server.sent_back <= 1.0 / NOTHING_NEW_S
            server.paused = False
            await writing
        finally:
            await engine.close()
            await server.stop()

    asyncio.run(asyncio.wait_for(inner(), 60))


def test_the_wait_for_a_restart_does_not_count_as_retry_time(tmp_path: Path) -> None:
    class Restarting(RestartedServers):
        def _is_restarting(self) -> bool:
            return True

    async def body(engine: RemoteEngine, servers: list[Server]) -> None:
        for name in ("replica-0", "replica-1"):
            engine.withdraw(name)
        writing = asyncio.create_task(engine.generate([request()]))
        await asyncio.sleep(2.5)
        assert not writing.done(), "2 s is the limit of retries"
        await engine.replace("replica-0", engine._replica("replica-0").endpoint)
        assert len((await writing)[0].tokens) == 4

    with_two_servers(Restarting, tmp_path, body)


def test_a_request_that_failed_during_an_update_is_repeated_with_the_new_weights(tmp_path: Path) -> None:
    """Repeated at once, it would be answered by the new weights and labelled with the old version."""

    async def body(engine: RemoteEngine, servers: list[Server]) -> None:
        asked, fail = asyncio.Event(), asyncio.Event()

        async def answer(wanted: dict[str, Any]) -> Any:
            if not asked.is_set():
                asked.set()
                await fail.wait()
                return 500
            server = next(one for one in servers if wanted in one.bodies)
            return complete_answer(wanted, label=server.label)

        for server in servers:
            server.answer = answer
        tokens = torch.tensor([3, 4]).numpy().astype("int32")
        writing = asyncio.create_task(engine.generate([GenerateRequest("row", tokens, Sampling(4), 1)]))
        await asked.wait()
        updating = asyncio.create_task(engine.update_weights(1, WEIGHTS))
        await asyncio.sleep(0.05)
        fail.set()
        await updating
        (generation,) = await writing
        assert generation.weight_versions.tolist() == [1] * 4
        bodies = [one for server in servers for one in server.bodies]
        assert sorted(one["cache_salt"] for one in bodies) == ["weights-0", "weights-1"]

    with_two_servers(RemoteEngine, tmp_path, body)


def test_tensors_on_the_cpu_are_published_by_snapshot_even_with_a_gpu_handover(tmp_path: Path) -> None:
    async def body(engine: RemoteEngine, servers: list[Server]) -> None:
        await engine.update_weights(1, WEIGHTS)
        assert all(server.calls.count("/collective_rpc") == 1 for server in servers)
        assert list(tmp_path.glob("understudy-weights-*/v1/model.safetensors"))

    with_two_servers(RemoteEngine, tmp_path, body, handover=GpuHandover())
    assert not list(tmp_path.iterdir()), "closing removes the snapshots"


class LeftPaused(Server):
    """Accepts commands, and answers no request for tokens while it is paused."""

    def __init__(self) -> None:
        super().__init__(lambda body: complete_answer(body, label=self.label))
        self.open = asyncio.Event()

    async def handle(self, request: Request) -> Response:
        if request.url.path == "/resume":
            self.open.set()
        elif request.url.path == "/pause":
            self.open.clear()
        elif request.url.path == "/inference/v1/generate":
            await self.open.wait()
        return await super().handle(request)


def test_a_new_engine_resumes_servers_that_a_killed_trainer_left_paused(tmp_path: Path) -> None:
    async def inner() -> None:
        server = LeftPaused()
        engine = RemoteEngine(
            DIALECTS["vllm"], [await server.start()], model="student", max_length=64, snapshots=tmp_path
        )
        try:
            await engine.update_weights(3, WEIGHTS)
            await asyncio.wait_for(engine.generate([request()]), 10)
            await engine.update_weights(4, WEIGHTS)
            assert server.calls.count("/resume") == 1, "an idle server is not resumed at every publish"
        finally:
            await engine.close()
            await server.stop()

    asyncio.run(inner())


def test_a_publish_to_a_full_disk_raises_and_leaves_no_snapshot(tmp_path: Path) -> None:
    async def body(engine: RemoteEngine, servers: list[Server]) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
        try:
            with pytest.raises(EngineError, match="weights of version 1 could not be written to"):
                await engine.update_weights(1, [("w", torch.zeros(1 << 20))])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert not list(tmp_path.rglob("*.safetensors"))
        await engine.update_weights(1, WEIGHTS)

    with_two_servers(RemoteEngine, tmp_path, body)
