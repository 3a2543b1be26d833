"""The engine contract for engine processes, and process failures: kills, freezes, invalid requests."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from engine_contract import (
    CANDIDATE_CHECKS,
    CHECKS,
    CONTROL_CHECKS,
    check_a_live_update_splits_generations_by_version,
    forced,
    requests,
    until,
)
from engines_under_contract import CONTEXT, VOCAB, hf_composed, make_model
from hosted_rig import hosted

from understudy.cluster.local import LocalProcesses
from understudy.engines.base import GenerateRequest, Generation, Sampling
from understudy.engines.hosted import process as host
from understudy.engines.hosted.app import HostApp
from understudy.engines.hosted.client import HostChannel, HostLost
from understudy.engines.hosted.engine import HostedEngine
from understudy.engines.hosted.messages import encode_call
from understudy.engines.local.engine import HFEngine
from understudy.errors import EngineError
from understudy.observability.owned_folder import OwnedFolder
from understudy.serving.client import Reply
from understudy.serving.endpoint import Endpoint
from understudy.serving.frames import MAGIC, PREFIX
from understudy.serving.supervisor import RestartCount, Restarts
from understudy.types.trajectory import StopReason


def assert_same_bits(found: list[Generation], expected: list[Generation]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.tokens.tobytes() == other.tokens.tobytes()
        assert one.logprobs.tobytes() == other.logprobs.tobytes()
        assert one.weight_versions.tobytes() == other.weight_versions.tobytes()
        assert one.stop_reason is other.stop_reason
        assert (one.candidate_ids is None) == (other.candidate_ids is None)
        if one.candidate_ids is not None and other.candidate_ids is not None:
            assert one.candidate_ids.tobytes() == other.candidate_ids.tobytes()


def mixed_batch(seed: int) -> list[GenerateRequest]:
    """Every kind of sampling in one batch, with more rows than the engine decodes at once."""
    kinds = [
        Sampling(9, (2,)),
        Sampling(12, temperature=0.6, top_p=0.8),
        Sampling(5, temperature=0.0),
        Sampling(7, top_k=5, min_p=0.02, repetition_penalty=1.3, candidates=4),
    ]
    rng = np.random.default_rng(seed)
    return [
        GenerateRequest(
            f"row-{seed}-{i}",
            rng.integers(3, VOCAB, rng.integers(1, 30)).astype(np.int32),
            kinds[i % 4],
            int(rng.integers(0, 1 << 62)),
        )
        for i in range(13)
    ]


Opened = tuple[asyncio.Runner, HostedEngine, LocalProcesses]


def opened(folder: Path, **settings: Any) -> Iterator[Opened]:
    """One engine shared by many tests, since a process takes seconds to start."""
    with asyncio.Runner() as runner:
        context = hosted(make_model(), folder, **settings)
        engine, processes = runner.run(context.__aenter__())
        yield runner, engine, processes
        runner.run(context.__aexit__(None, None, None))


@pytest.fixture(scope="module")
def composed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    yield from opened(tmp_path_factory.mktemp("composed"))


@pytest.fixture(scope="module")
def continuous(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    yield from opened(tmp_path_factory.mktemp("continuous"), hosts=2, deterministic=False)


@pytest.mark.parametrize(
    "check", [*CHECKS, *CONTROL_CHECKS, *CANDIDATE_CHECKS], ids=lambda check: check.__name__
)
@pytest.mark.parametrize("kind", ["composed", pytest.param("continuous", marks=pytest.mark.slow)])
def test_contract(kind: str, check: Any, request: pytest.FixtureRequest) -> None:
    runner, engine, _ = request.getfixturevalue(kind)
    runner.run(asyncio.wait_for(check(engine, make_model()), 60))


def test_an_engine_process_refuses_invalid_requests_and_wrong_tokens_and_keeps_serving(
    composed: Opened,
) -> None:
    runner, engine, _ = composed
    good = encode_call(1, requests(1, Sampling(3)))
    rng = np.random.default_rng(0)
    bad = [b"", b"x", good[:20], good[:-1], good + b"\0", MAGIC + b"\xff" * 40, b"ABCD" + good[4:]]
    bad += [
        PREFIX.pack(MAGIC, 1 << 31, 0) + good[PREFIX.size :],
        good.replace(b"row-0", b"\xff\xfe\xfd\xfc\xfb"),
    ]
    bad += [rng.bytes(int(size)) for size in rng.integers(1, 400, 20)]

    async def body() -> None:
        endpoint = engine._channels["replica-0"].endpoint
        token = f"Bearer {endpoint.token}"
        http = httpx.AsyncClient(base_url=endpoint.url, headers={"Authorization": token})
        for frame in bad:
            reply = await http.post("/v1/generate", content=frame)
            assert reply.status_code == 400 and reply.json()["error"]["message"], frame
        for order in (
            b"",
            b"[]",
            b'{"version": "x"}',
            b'{"version": 1, "file": "../../etc/passwd"}',
            b'{"version": 2147483648}',
            b'{"version": 1000000000000000000000000000000}',
            b'{"version": -2}',
        ):
            assert (await http.post("/v1/weights", content=order)).status_code == 400
        missing = {"version": 1, "file": "v9.safetensors"}
        assert (await http.post("/v1/weights", json=missing)).status_code == 422
        for wrong in ({}, {"Authorization": "Bearer no"}, {"Authorization": token + "x"}):
            async with httpx.AsyncClient(base_url=endpoint.url, headers=wrong) as stranger:
                for path in ("/v1/generate", "/v1/weights", "/v1/pause", "/v1/resume", "/v1/abort"):
                    assert (await stranger.post(path, content=good)).status_code == 401
                assert (await stranger.get("/health")).json() == {"status": "ok", "version": 0}
        assert len((await engine.generate(requests(1, Sampling(3))))[0].tokens) == 3

    runner.run(asyncio.wait_for(body(), 60))


def test_a_cancelled_call_frees_the_engine_for_waiting_calls(composed: Opened) -> None:
    runner, engine, _ = composed

    async def body() -> None:
        long = asyncio.create_task(engine.generate(requests(256, Sampling(CONTEXT - 20))))
        await asyncio.sleep(0.1)
        waiting = asyncio.create_task(engine.generate(requests(1, Sampling(2))))
        await asyncio.sleep(0.05)
        long.cancel()
        await waiting
        with pytest.raises(asyncio.CancelledError):
            await long
        assert set(engine.outstanding_tokens.values()) == {0}

    runner.run(asyncio.wait_for(body(), 60))


def test_continuous_hosts_share_the_load_and_sessions_stay_on_their_host(continuous: Opened) -> None:
    runner, engine, _ = continuous

    async def body() -> None:
        asked = [
            GenerateRequest(r.key, r.tokens, r.sampling, r.seed, session=f"session-{i}")
            for i, r in enumerate(requests(16, Sampling(40)))
        ]
        await engine.pause()  # so that no request is answered before all are sent
        task = asyncio.create_task(engine.generate(asked))
        await until(lambda: len(engine._replicas._homes) == len(asked))
        loads = engine.outstanding_tokens
        assert min(loads.values()) > 0.4 * sum(loads.values())
        await engine.resume()
        first = await task
        assert set(engine.outstanding_tokens.values()) == {0}
        homes = {name: host.name for name, host in engine._replicas._homes.items()}
        again = await engine.generate(asked)
        assert homes == {name: host.name for name, host in engine._replicas._homes.items()}
        assert [g.tokens.tolist() for g in first] == [g.tokens.tolist() for g in again]

    runner.run(asyncio.wait_for(body(), 60))


@pytest.mark.parametrize("kind", ["composed", "continuous"])
def test_live_update(kind: str, request: pytest.FixtureRequest) -> None:
    runner, engine, _ = request.getfixturevalue(kind)
    runner.run(check_a_live_update_splits_generations_by_version(engine, make_model(), make_model(seed=1)))


@pytest.mark.slow
def test_a_killed_engine_process_is_replaced_in_a_batch_and_in_a_pause_and_close_ends_calls(
    composed: Opened,
) -> None:
    runner, engine, processes = composed
    one, two = make_model(seed=1), make_model(seed=2)
    runner.run(engine.update_weights(1, [(name, tensor.detach()) for name, tensor in one.named_parameters()]))

    def kill() -> int:
        pid = int(processes.children["rollout-0"].ready["pid"])
        os.kill(pid, signal.SIGKILL)
        return pid

    async def mid_batch() -> None:
        asked = requests(4, Sampling(CONTEXT - 20))
        task = asyncio.create_task(engine.generate(asked))
        await until(lambda: any(engine.outstanding_tokens.values()))
        old = kill()
        for request, generation in zip(asked, await task, strict=True):
            assert set(generation.weight_versions.tolist()) == {1} and len(generation.tokens) == CONTEXT - 20
            np.testing.assert_allclose(generation.logprobs, forced(one, request, generation), atol=2e-4)
        assert processes.children["rollout-0"].ready["pid"] != old

    async def paused() -> None:
        await engine.pause()
        kill()
        await engine.update_weights(2, [(name, tensor.detach()) for name, tensor in two.named_parameters()])
        assert engine.version == 2, "a dead host must not block a publish"
        asked = requests(2, Sampling(10))
        waiting = asyncio.create_task(engine.generate(asked))
        while engine._restarting:
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.3)
        assert not waiting.done(), "the new process must be paused like the old one"
        await engine.resume()
        for request, generation in zip(asked, await waiting, strict=True):
            assert set(generation.weight_versions.tolist()) == {2}
            np.testing.assert_allclose(generation.logprobs, forced(two, request, generation), atol=2e-4)

    async def given_up_and_closed() -> None:
        kill()
        asked = requests(2, Sampling(CONTEXT - 20))
        lost = asyncio.create_task(engine.generate(asked))
        while not engine._restarting:
            await asyncio.sleep(0.01)
        await engine.abort()
        assert [g.stop_reason for g in await asyncio.wait_for(lost, 30)] == [StopReason.ABORTED] * 2
        running = asyncio.create_task(engine.generate(asked))
        await until(lambda: not engine._restarting and any(engine.outstanding_tokens.values()))
        await engine.close()
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await running
        assert not processes.children and not engine._delivery.folder.exists()

    for part in (mid_batch, paused, given_up_and_closed):
        runner.run(asyncio.wait_for(part(), 90))


def test_a_generation_of_a_closing_engine_process_fails_as_host_lost_so_that_it_is_retried(
    tmp_path: Path,
) -> None:
    """A SIGTERM of an engine process during generation once ended the run with "the engine was closed while …"."""

    async def body() -> None:
        engine = HFEngine(
            make_model(seed=1), max_batch=8, device="cpu", pad_id=0, max_length=CONTEXT, version=0
        )
        app = HostApp(engine, token="ours", weights=None)
        headers = {"Authorization": "Bearer ours"}
        transport = httpx.ASGITransport(app.asgi)
        async with httpx.AsyncClient(transport=transport, base_url="http://host", headers=headers) as http:
            await engine.pause()
            asked = encode_call(1, requests(2, Sampling(20)))
            waiting = asyncio.create_task(http.post("/v1/generate", content=asked))
            await asyncio.sleep(0.2)
            await engine.close()
            for answer in (await waiting, await http.post("/v1/generate", content=asked)):
                reply = Reply(answer.status_code, answer.content, answer.headers["content-type"])
                channel = HostChannel("rollout-0", Endpoint("http://host"))
                with pytest.raises(HostLost, match="closed"):
                    raise channel.refusal("/v1/generate", reply)

    asyncio.run(asyncio.wait_for(body(), 60))


@pytest.mark.slow
def test_engine_processes_give_the_bits_of_the_in_process_engine_after_an_update_and_a_kill(
    tmp_path: Path,
) -> None:
    new = [(name, tensor.detach()) for name, tensor in make_model(seed=1).named_parameters()]

    async def body() -> None:
        async with (
            hf_composed(make_model(), tmp_path) as inside,
            hosted(make_model(), tmp_path, hosts=2) as (outside, processes),
        ):
            torch.set_num_threads(1)
            batches = [mixed_batch(seed) for seed in range(6)]
            answers = await asyncio.gather(*(outside.generate(batch) for batch in batches))
            for batch, answer in zip(batches, answers, strict=True):
                assert_same_bits(answer, await inside.generate(batch))
            for engine in (inside, outside):
                await engine.update_weights(7, new)
            tasks = [asyncio.create_task(outside.generate(batch)) for batch in batches]
            await asyncio.sleep(0.02)
            os.kill(processes.children["rollout-0"].ready["pid"], signal.SIGKILL)
            for batch, task in zip(batches, tasks, strict=True):
                assert_same_bits(await task, await inside.generate(batch))

    asyncio.run(asyncio.wait_for(body(), 120))


@pytest.mark.slow
def test_a_frozen_engine_process_is_replaced_after_silence_s(tmp_path: Path) -> None:
    async def body() -> None:
        async with hosted(make_model(), tmp_path) as (engine, processes):
            engine._silence_s = 1.0
            os.kill(processes.children["rollout-0"].ready["pid"], signal.SIGSTOP)
            (generation,) = await engine.generate(requests(1, Sampling(4)))
            assert len(generation.tokens) == 4

    asyncio.run(asyncio.wait_for(body(), 120))


@pytest.mark.slow
def test_a_host_that_cannot_be_restarted_is_given_up_with_the_error_from_its_log(tmp_path: Path) -> None:
    async def body() -> None:
        async with hosted(make_model(), tmp_path) as (engine, processes):
            notes: list[str] = []
            engine._restarts = dict.fromkeys(
                engine._restarts, RestartCount(Restarts(most=2, first_wait_s=0.05))
            )
            engine._notify = notes.append
            (tmp_path / "student" / "config.json").write_text("{}")
            os.kill(processes.children["rollout-0"].ready["pid"], signal.SIGKILL)
            with pytest.raises(EngineError, match=r"no engine process is left.*cannot be loaded"):
                await engine.generate(requests(1, Sampling(4)))
            assert "none serves now, so the run waits until one is back" in notes[0]
            assert "given up after 2 restarts" in notes[-1] and len(notes) == 2

    asyncio.run(asyncio.wait_for(body(), 120))


def test_a_host_that_cannot_load_its_model_exits_with_a_one_line_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert host.main(["--model", str(tmp_path), "--max-length", "8"]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith(f"error: the model {tmp_path} cannot be loaded")
    assert host.main(["--model", str(tmp_path), "--max-length", "8", "--bind", "0.0.0.0:0"]) == 2
    assert "refused without a token" in capsys.readouterr().err


@pytest.mark.parametrize("trainer", [pytest.param("gone", marks=pytest.mark.slow), "lives"])
def test_a_host_exits_with_its_launcher_and_deletes_snapshots_if_the_trainer_is_gone(
    tmp_path: Path, trainer: str
) -> None:
    """On a cluster the launcher may die alone, while the trainer that owns the folder of snapshots lives on."""
    make_model().save_pretrained(tmp_path / "student")
    owned, ready = OwnedFolder("weights-", tmp_path), tmp_path / "ready"
    weights = owned.path
    if trainer == "gone":
        os.close(owned._file or -1)
    for name in ("v3.safetensors", ".v4.safetensors"):
        (weights / name).write_bytes(b"x")
    read, write = os.pipe()
    arguments = ["--model", str(tmp_path / "student"), "--max-length", "32", "--threads", "1"]
    arguments += ["--weights", str(weights), "--ready-file", str(ready), "--watch-fd", str(read)]
    process = subprocess.Popen(
        [sys.executable, "-m", "understudy.engines.hosted.process", *arguments], pass_fds=[read]
    )
    try:
        os.close(read)
        while not ready.exists():
            assert process.poll() is None
            time.sleep(0.05)
        os.close(write)
        assert process.wait(timeout=30) == 3
        assert (weights / "v3.safetensors").exists() == (trainer == "lives")
    finally:
        process.kill()
        process.wait()
