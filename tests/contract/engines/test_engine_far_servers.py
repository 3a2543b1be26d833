"""The engine contract over servers that a worker asks itself, and what only such requests can suffer."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvicorn
from asking_worker import AskingWorker
from engine_contract import (
    CANDIDATE_CHECKS,
    CHECKS,
    CONTROL_CHECKS,
    check_a_live_update_splits_generations_by_version,
    requests,
    until,
    widening_pauses,
)
from engines_under_contract import CONTEXT, ENGINES, make_model
from starlette.applications import Starlette
from wire_servers import WireServer, listening

from understudy.engines.base import GenerateRequest, Sampling
from understudy.engines.remote_tokens import BearerGone
from understudy.engines.replicas import Endpoint
from understudy.engines.servers import remote_calls as remote_far
from understudy.engines.servers import worker_client as visits
from understudy.engines.servers.dialects import DIALECTS
from understudy.engines.servers.engine import RemoteEngine
from understudy.engines.servers.vllm_proxy import VLLMDoor
from understudy.errors import EngineError
from understudy.types.trajectory import StopReason

WIRES = ("vllm-wire", "sglang-wire", "openai-wire")
PUBLISHING = WIRES[:2]
LONG = Sampling(CONTEXT - 20)


def over(name: str, folder: Path, body: Callable[[AskingWorker, RemoteEngine], Awaitable[None]]) -> None:
    async def inner() -> None:
        async with ENGINES[name](make_model(), folder) as engine:
            assert isinstance(engine, RemoteEngine)
            worker = AskingWorker(engine)
            await body(worker, engine)
            assert all(one.outstanding_tokens == 0 for one in engine._replicas.all) and not len(engine._far)
            await worker.close()

    asyncio.run(asyncio.wait_for(inner(), 60))


@pytest.mark.parametrize("check", [*CHECKS, *CONTROL_CHECKS], ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", WIRES)
def test_contract(name: str, check: Any, tmp_path: Path) -> None:
    over(name, tmp_path, lambda worker, engine: check(worker, make_model()))


@pytest.mark.parametrize("name", PUBLISHING)
def test_live_update_and_candidates(name: str, tmp_path: Path) -> None:
    async def body(worker: AskingWorker, engine: RemoteEngine) -> None:
        for check in CANDIDATE_CHECKS:
            await check(worker, make_model())
        await check_a_live_update_splits_generations_by_version(worker, make_model(), make_model(seed=1))
        goes_on = [grant for grant in worker.grants if grant.after is not None]
        assert goes_on and all(grant.server.version >= 1 for grant in goes_on if grant.server)

    over(name, tmp_path, body)


def test_what_the_run_hears_does_not_grow_with_what_is_written(tmp_path: Path) -> None:
    async def body(worker: AskingWorker, engine: RemoteEngine) -> None:
        told = []
        for new in (2, 100):
            before = worker.bytes
            asked = requests(6, Sampling(new))
            far = await worker.generate(asked)
            told.append((worker.bytes - before) / 6)
            near = await engine.generate(asked)
            for one, other in zip(far, near, strict=True):
                assert one.tokens.tolist() == other.tokens.tolist() and len(one.tokens) == new
                np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
                assert one.weight_versions.tolist() == other.weight_versions.tolist()
        print("bytes a generation:", told)
        assert abs(told[1] - told[0]) <= 4 and told[1] < 400
        passed = engine.traffic.sent, engine.traffic.received
        await worker.generate(requests(3, Sampling(50)))
        assert (engine.traffic.sent, engine.traffic.received) == passed, (
            "the engine's own connections are idle"
        )

    over("vllm-wire", tmp_path, body)


def test_a_request_that_reaches_a_stopped_server_is_withdrawn_and_asked_under_the_new_weights(
    tmp_path: Path,
) -> None:
    """The server would let it wait, and have it written by weights it was not meant for."""

    async def body(worker: AskingWorker, engine: RemoteEngine) -> None:
        def on_its_way(grant: Any) -> Awaitable[None] | None:
            return asyncio.sleep(0.4) if len(worker.grants) == 1 else None

        worker.on_grant = on_its_way
        (asked,) = requests(1, Sampling(6))
        writing = asyncio.create_task(worker.generate([asked]))
        await until(lambda: worker.grants)
        began = time.monotonic()
        await engine.update_weights(1, list(make_model(seed=1).named_parameters()))
        assert 0.3 < time.monotonic() - began < 0.4 + visits.QUIET_S + 2.0
        ((written,)) = await writing
        assert written.weight_versions.tolist() == [1] * 6
        assert [grant.server.version for grant in worker.grants if grant.server] == [0, 1]

    over("vllm-wire", tmp_path, body)


def test_a_worker_that_hangs_holds_a_publish_up_for_a_while_and_is_not_listened_to_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_far, "CUT_PATIENCE_S", 0.5)

    async def body(worker: AskingWorker, engine: RemoteEngine) -> None:
        awake = asyncio.Event()
        worker.on_grant = lambda grant: awake.wait() if len(worker.grants) == 1 else None
        (asked,) = requests(1, Sampling(6))
        writing = asyncio.create_task(worker.generate([asked]))
        await until(lambda: worker.grants)
        worker.hang()
        other = asyncio.create_task(engine.generate(requests(3, LONG)))
        await asyncio.sleep(0.1)
        began = time.monotonic()
        await engine.update_weights(1, list(make_model(seed=1).named_parameters()))
        assert 0.4 < time.monotonic() - began < 5
        before = worker.bytes
        awake.set()  # asks the server by its old grant, and says what the new weights wrote: too late
        while worker.bytes == before:
            await asyncio.sleep(0.02)
        assert not writing.done()
        worker.wake()
        ((written,)) = await writing
        assert written.weight_versions.tolist() == [1] * 6
        assert [grant.server.version for grant in worker.grants if grant.server] == [0, 1]
        assert [len(one.tokens) for one in await other] == [CONTEXT - 20] * 3

    over("vllm-wire", tmp_path, body)


@pytest.mark.parametrize("leaves", ["session", "late"])
def test_a_worker_that_leaves_or_is_late_frees_the_server(leaves: str, tmp_path: Path) -> None:
    async def body(worker: AskingWorker, engine: RemoteEngine) -> None:
        if leaves == "late":
            worker._patience_s = 0.2
            engine._deadline_s = engine._deadline_per_token_s = 0.0
            worker.on_grant = lambda grant: asyncio.Event().wait()
        writing = asyncio.create_task(worker.generate(requests(1, LONG)))
        await until(lambda: worker.grants)
        if leaves == "session":
            worker.leave(0)
        with pytest.raises(BearerGone):
            await writing
        worker.on_grant = lambda grant: None
        engine._deadline_s = 60.0
        assert len((await worker.generate(requests(1, Sampling(4))))[0].tokens) == 4

    over("vllm-wire", tmp_path, body)


@asynccontextmanager
async def two_servers(
    folder: Path,
) -> AsyncIterator[tuple[AskingWorker, RemoteEngine, list[WireServer]]]:
    servers = [WireServer("vllm", make_model(), CONTEXT) for _ in range(2)]
    async with AsyncExitStack() as stack:
        opened = [listening(server) for server in servers]
        urls = [await stack.enter_async_context(one) for one in opened]
        engine = RemoteEngine(
            DIALECTS["vllm"], [Endpoint(url) for url in urls], model="student", max_length=CONTEXT, version=0,
            snapshots=folder, patience_s=10,
        )  # fmt: skip
        worker = AskingWorker(engine)
        try:
            yield worker, engine, servers
        finally:
            await engine.close()
            await worker.close()


def answers_of(found: Any) -> list[list[int]]:
    return [one.tokens.tolist() for one in found]


def test_a_server_that_fails_in_the_middle_costs_nothing_but_a_detour(tmp_path: Path) -> None:
    async def body() -> None:
        async with two_servers(tmp_path) as made:
            worker, engine, servers = made
            asked = requests(8, Sampling(40))
            expected = answers_of(await engine.generate(asked))
            writing = asyncio.create_task(worker.generate(asked))
            await asyncio.sleep(0.1)
            servers[0].failures = [500] * 20
            await servers[0].engine.close()  # what it was writing fails
            assert answers_of(await writing) == expected
            servers[1].failures = [400]
            with pytest.raises(EngineError, match="400"):
                for i in range(4):
                    await worker.generate([GenerateRequest(f"refused-{i}", asked[0].tokens, Sampling(2), 1)])

    asyncio.run(asyncio.wait_for(body(), 60))


def test_a_server_that_is_known_to_be_gone_is_not_waited_for(tmp_path: Path) -> None:
    """Its machine does not even hang up; whoever started it knows."""

    async def body() -> None:
        async with two_servers(tmp_path) as made:
            worker, engine, servers = made
            servers[0]._open.clear()  # takes requests and never answers
            writing = asyncio.create_task(worker.generate(requests(4, Sampling(4))))
            await asyncio.sleep(0.3)
            assert not writing.done()
            engine.withdraw("replica-0")
            assert [len(one.tokens) for one in await asyncio.wait_for(writing, 10)] == [4] * 4
            servers[0]._open.set()

    asyncio.run(asyncio.wait_for(body(), 60))


def test_where_only_the_way_is_cut_another_server_is_asked_and_none_is_blamed(tmp_path: Path) -> None:
    """The trainer reaches the first server by a connection that the worker has not."""

    async def body() -> None:
        async with two_servers(tmp_path) as made:
            worker, engine, servers = made
            first = engine._replicas.all[0]
            first.endpoint = Endpoint("http://127.0.0.1:9")
            found = await worker.generate(requests(4, Sampling(4)))
            assert [len(one.tokens) for one in found] == [4] * 4
            assert any(grant.url.endswith(":9") for grant in worker.grants)
            assert first.failures == 0 and first.resting_until == 0.0 and not servers[0].bodies
            engine._replicas.all[1].endpoint, engine._patience_s = Endpoint("http://127.0.0.1:9"), 1.0
            with pytest.raises(EngineError, match="lives, and a worker could not reach it"):
                await worker.generate(requests(1, Sampling(4)))

    asyncio.run(asyncio.wait_for(body(), 60))


def test_the_door_of_a_stopped_server_sends_requests_back_at_once(tmp_path: Path) -> None:
    async def body() -> None:
        server = WireServer("vllm", make_model(), CONTEXT)
        socket = str(tmp_path / "socket")
        vllm = uvicorn.Server(
            uvicorn.Config(Starlette(routes=server.routes), uds=socket, log_level="error", lifespan="off")
        )
        door = VLLMDoor(socket, token="t0ken", address="127.0.0.1")
        front = uvicorn.Server(
            uvicorn.Config(door.asgi, host="127.0.0.1", port=0, log_level="error", lifespan="off")
        )
        serving = [asyncio.create_task(one.serve()) for one in (vllm, front)]
        while not (vllm.started and front.started):
            await asyncio.sleep(0.01)
        url = f"http://127.0.0.1:{front.servers[0].sockets[0].getsockname()[1]}"
        engine = RemoteEngine(
            DIALECTS["vllm"], [Endpoint(url, key="t0ken")], model="student", max_length=CONTEXT, version=0,
            snapshots=tmp_path, patience_s=10,
        )  # fmt: skip
        worker = AskingWorker(engine)
        worker.on_grant = lambda grant: asyncio.sleep(0.4) if len(worker.grants) == 1 else None
        long = asyncio.create_task(engine.generate(requests(2, LONG)))
        late = asyncio.create_task(worker.generate(requests(1, Sampling(6))))
        await until(lambda: worker.grants)
        began = time.monotonic()
        await engine.update_weights(1, list(make_model(seed=1).named_parameters()))
        assert time.monotonic() - began < visits.QUIET_S, "nothing is waited out"
        ((written,)) = await late
        assert written.weight_versions.tolist() == [1] * 6
        assert [len(one.tokens) for one in await long] == [CONTEXT - 20] * 2
        assert engine._replicas.all[0].failures == 0
        await engine.close()
        await worker.close()
        await door.close()
        await server.engine.close()
        vllm.should_exit = front.should_exit = True
        await asyncio.gather(*serving)

    asyncio.run(asyncio.wait_for(body(), 60))


def test_an_aborted_generation_keeps_what_it_had_before_the_pause(tmp_path: Path) -> None:
    async def body(worker: AskingWorker, engine: RemoteEngine) -> None:
        for pause in widening_pauses():
            writing = asyncio.create_task(worker.generate(requests(2, LONG)))
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

    over("vllm-wire", tmp_path, body)
