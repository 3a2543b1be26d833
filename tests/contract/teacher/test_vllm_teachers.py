"""vLLM servers that a run starts as teachers: restarted when they die, given up with their log, ended with the run.

The launcher, the parent process, the pool and the client are the real ones. `bigram_server` stands in for vLLM.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from bigram_server import LAST_WORDS, lives, logprobs, stand_in
from teacher_rig import VOCAB, random_items, write_model

from understudy.assembly.teachers.launchers import VLLMTeachers
from understudy.cluster.local import Child, LocalProcesses
from understudy.config import parse_recipe
from understudy.errors import ClusterError, TeacherError, UnderstudyError
from understudy.planning.seating import Seats, seat
from understudy.serving.endpoint import Endpoint
from understudy.serving.supervisor import Restarts
from understudy.teacher.clients.discover import Backend, connect_external
from understudy.teacher.manifest import RequestBatching
from understudy.teacher.pool.events import EventKind, PoolEvent
from understudy.teacher.pool.health import HealthRules
from understudy.teacher.pool.launch import ReplicaSpec
from understudy.teacher.pool.options import PoolOptions, SupervisorOptions
from understudy.teacher.pool.pool import TeacherPool
from understudy.types.scores import ScoreItem, Signal, TeacherScores

pytestmark = pytest.mark.timeout(120)
K = 4
Body = Callable[[TeacherPool, LocalProcesses, list[PoolEvent]], Awaitable[None]]


def with_teacher(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    body: Body,
    plan: str = "serves",
    most: int = 3,
    processes: type[LocalProcesses] = LocalProcesses,
    **teacher: Any,
) -> None:
    """Runs `body` with the pool of one vLLM teacher. Asserts that no process of it is left afterwards."""
    for key, value in stand_in(folder, plan).items():
        monkeypatch.setenv(key, value)
    model = str(write_model(folder / "model", "llama"))
    table = {"model": model, "backend": "vllm", "vllm_python": sys.executable, "device": "cpu", **teacher}
    recipe = parse_recipe(
        {"student": {"model": model}, "teachers": {"big": table}, "data": {"train": "rows.jsonl"}}
    )

    async def inner() -> None:
        started, events = processes(folder / "logs", start_timeout=60), list[PoolEvent]()
        config = recipe.teachers["big"]
        seats = Seats(seat(recipe, 0), [])
        launcher = VLLMTeachers(started, "big", config, RequestBatching.BY_REQUEST, "token", seats, K)
        rules = HealthRules(restarts=Restarts(most, first_wait_s=0.05, longest_wait_s=0.2))
        pool = TeacherPool(
            "big",
            [ReplicaSpec(str(i)) for i in range(config.replicas)],
            launcher,
            options=PoolOptions(supervisor=SupervisorOptions(health=rules, watch_every=0.05)),
            connect=connect_external(
                VOCAB, model="big", backend=Backend.VLLM, k=K, batching=RequestBatching.BY_REQUEST
            ),
            on_event=events.append,
        )
        try:
            await pool.start()
            await body(pool, started, events)
        finally:
            await pool.close()
            await started.close()

    before = set(psutil.Process().children(recursive=True))
    asyncio.run(asyncio.wait_for(inner(), 100))
    assert not set(psutil.Process().children(recursive=True)) - before
    assert not running_servers(folder)


def running_servers(folder: Path) -> list[int]:
    """Process ids of this test's servers, including those that are not children of the test's process."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        command = " ".join(process.info["cmdline"] or [])
        if str(folder / "model") in command and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process.info["pid"])
    return found


def assert_enumerated(items: list[ScoreItem], scores: list[Any]) -> None:
    for item, one in zip(items, scores, strict=True):
        assert isinstance(one, TeacherScores) and one.key == item.key
        rows = [logprobs(int(item.tokens[at - 1]), VOCAB) for at in item.positions]
        own = [row[int(item.tokens[at])] for row, at in zip(rows, item.positions, strict=True)]
        np.testing.assert_allclose(one.sampled_logprobs, own, rtol=1e-6)
        if item.signal is Signal.TOPK:
            best = [sorted(row, reverse=True)[:K] for row in rows]
            np.testing.assert_allclose(one.logprobs, best, rtol=1e-6)


def child_of(processes: LocalProcesses, replica: int = 0) -> Child:
    return processes.children[f"teacher-big-{replica}"]


def test_a_vllm_teacher_is_started_with_the_recipes_settings_and_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(pool: TeacherPool, processes: LocalProcesses, events: list[PoolEvent]) -> None:
        items = [*random_items(5, 1, Signal.TOPK, K), *random_items(3, 2, Signal.SAMPLED)]
        assert_enumerated(items, await pool.score(items))
        manifest = pool.manifest
        assert manifest.backend == "vllm" and manifest.limits.max_k == K
        assert manifest.limits.max_length == 48 and manifest.batching is RequestBatching.BY_REQUEST
        assert child_of(processes).ready["socket"], (
            "a local server must be reached by a socket that only this user can open"
        )

    with_teacher(
        tmp_path,
        monkeypatch,
        body,
        context_length=48,
        dtype="bfloat16",
        tensor_parallel=2,
        engine_args=["--gpu-memory-utilization=0.4"],
    )
    (command,) = lives(tmp_path)
    line = " ".join(command)
    for part in (
        f"--model {tmp_path / 'model'}", "--served-model-name big", "--dtype bfloat16", "--max-model-len 48", "--max-num-seqs 1",
        f"--max-logprobs={K + 4}", "--tensor-parallel-size=2", "--gpu-memory-utilization=0.4", "--no-enable-prefix-caching", "--enforce-eager",
    ):  # fmt: skip
        assert part in line
    assert "--worker-extension-cls" not in line and "processed_logprobs" not in line


@pytest.mark.parametrize("killed", ["server", "pid"], ids=["the server", "its parent process"])
def test_a_killed_vllm_teacher_is_restarted_and_no_row_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: str
) -> None:
    async def body(pool: TeacherPool, processes: LocalProcesses, events: list[PoolEvent]) -> None:
        items = random_items(4, 1, Signal.TOPK, K)
        before = await pool.score(items)
        os.kill(child_of(processes).ready[killed], signal.SIGKILL)
        first = await pool.score(items)  # a server whose parent was killed may still answer
        await until(lambda: EventKind.RESTARTED in [event.kind for event in events])
        for after in (first, await pool.score(items)):
            assert_enumerated(items, after)
            for one, other in zip(before, after, strict=True):
                assert isinstance(one, TeacherScores) and isinstance(other, TeacherScores)
                assert one.logprobs is not None and other.logprobs is not None
                assert one.logprobs.tobytes() == other.logprobs.tobytes()
        await until(lambda: len(running_servers(tmp_path)) == 2)  # one server and its parent

    with_teacher(tmp_path, monkeypatch, body)
    assert len(lives(tmp_path)) == 2


def test_a_request_is_retried_on_the_other_vllm_server_when_one_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(pool: TeacherPool, processes: LocalProcesses, events: list[PoolEvent]) -> None:
        for seed in range(6):
            items = random_items(4, seed, Signal.TOPK, K)
            assert_enumerated(items, await pool.score(items))
        assert any(event.kind is EventKind.RETRIED for event in events)

    with_teacher(tmp_path, monkeypatch, body, plan="12,serves", replicas=2)


def test_a_vllm_teacher_is_given_up_after_its_restarts_with_the_last_line_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(pool: TeacherPool, processes: LocalProcesses, events: list[PoolEvent]) -> None:
        os.kill(child_of(processes).ready["server"], signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(ClusterError) as caught:
            await pool.score(random_items(2, 1, Signal.SAMPLED))
        assert time.monotonic() - began < 60
        message = str(caught.value)
        assert (
            LAST_WORDS in message
            and "given up after 1 restart in a row (cluster.restarts.teacher)" in message
        )

    with_teacher(tmp_path, monkeypatch, body, plan="serves,dies at once", most=1)
    assert len(lives(tmp_path)) == 2


def test_a_vllm_teacher_that_never_starts_ends_the_run_with_the_last_line_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(pool: TeacherPool, processes: LocalProcesses, events: list[PoolEvent]) -> None:
        raise AssertionError("the server started")

    with pytest.raises(UnderstudyError, match="No available memory for the cache blocks"):
        with_teacher(tmp_path, monkeypatch, never, plan="dies at once")


class RemoteProcesses(LocalProcesses):
    """Local processes reported as being on other machines."""

    def is_remote(self, name: str) -> bool:
        return True


@pytest.mark.slow
def test_a_remote_vllm_teacher_is_reached_through_a_proxy_that_needs_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(pool: TeacherPool, processes: LocalProcesses, events: list[PoolEvent]) -> None:
        items = random_items(3, 1, Signal.TOPK, K)
        assert_enumerated(items, await pool.score(items))
        ready = child_of(processes).ready
        assert "socket" not in ready
        connect = connect_external(VOCAB, model="big", backend=Backend.VLLM, k=K)
        stranger = connect("big", "0", Endpoint(ready["url"]))
        try:
            with pytest.raises(TeacherError, match="401"):
                await stranger.manifest()
        finally:
            await stranger.close()
        os.kill(ready["server"], signal.SIGKILL)
        assert_enumerated(items, await pool.score(items))

    with_teacher(tmp_path, monkeypatch, body, processes=RemoteProcesses)


async def until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not holds():
                await asyncio.sleep(0.1)
    assert holds()
