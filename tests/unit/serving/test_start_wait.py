"""The start of a run waits for servers that load their model, and not for problems that waiting cannot solve."""

import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from understudy.config import parse_recipe
from understudy.errors import ClusterError
from understudy.run.running_servers import running_servers
from understudy.serving.endpoint import Endpoint
from understudy.serving.start_wait import Servers, StartWait, wait_for_servers

Status = tuple[int, dict[str, str]]
READY: Status = (200, {})


class LoadingServer:
    """A server that answers with one status after another and repeats the last. None closes the connection."""

    def __init__(self, answers: Sequence[Status | None]) -> None:
        self._answers = list(answers)
        self.requests: list[tuple[str, float]] = []
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                while (await reader.readline()).strip():
                    pass
                self.requests.append((line.split()[1].decode(), time.monotonic()))
                answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
                if answer is None:
                    return
                body = b'{"error": {"message": "the model is loading"}}'
                headers = "".join(f"{name}: {value}\r\n" for name, value in answer[1].items())
                head = f"HTTP/1.1 {answer[0]} X\r\n{headers}content-length: {len(body)}\r\n\r\n"
                writer.write(head.encode() + body)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(f"http://127.0.0.1:{self.port}")


def wait_and_collect_notes(loading: LoadingServer, most: float, **more: Any) -> list[str]:
    """Waits for the server and returns the notes for the user."""
    notes: list[str] = []

    async def wait() -> None:
        async with await asyncio.start_server(loading.serve, "127.0.0.1", 0) as server:
            loading.port = server.sockets[0].getsockname()[1]
            await wait_for_servers(
                [Servers("teachers.t.urls", [loading.endpoint], "/health", **more)], most, notes.append
            )

    asyncio.run(asyncio.wait_for(wait(), 60))
    return notes


def test_the_start_waits_for_a_server_that_loads_its_model_and_notes_the_wait_once() -> None:
    loading = LoadingServer([(503, {}), None, None, (502, {}), (429, {}), (504, {}), READY])
    notes = wait_and_collect_notes(loading, 60.0)
    assert len(loading.requests) == 7 and {path for path, _ in loading.requests} == {"/health"}
    assert len(notes) == 2 and notes[1].startswith("teachers.t.urls: answers after ")
    assert notes[0] == (
        f"teachers.t.urls: waiting up to 60 s (cluster.start_timeout_seconds) for {loading.endpoint.url}: 503 the model is loading; "
        "Ctrl-C ends the wait"
    )


def test_a_server_is_not_asked_again_before_its_retry_after_has_passed() -> None:
    loading = LoadingServer([(503, {"Retry-After": "2"}), READY])
    assert len(wait_and_collect_notes(loading, 60.0)) == 2
    (_, first), (_, second) = loading.requests
    assert second - first >= 1.9


@pytest.mark.parametrize("status", [200, 401, 403, 404, 405, 500])
def test_any_other_answer_ends_the_wait_at_once(status: int) -> None:
    loading = LoadingServer([(status, {})])
    assert wait_and_collect_notes(loading, 600.0) == [] and len(loading.requests) == 1


def test_the_error_after_the_time_limit_names_the_limit_the_last_answer_and_the_key_to_set() -> None:
    loading = LoadingServer([(503, {"Retry-After": "3600"})])
    with pytest.raises(ClusterError) as error:
        wait_and_collect_notes(loading, 1.5)
    assert len(loading.requests) == 2, "there is no last attempt when the time is over"
    assert str(error.value) == (
        f"teachers.t.urls: no answer within 1.5 s (cluster.start_timeout_seconds); the last one of {loading.endpoint.url}: "
        "503 the model is loading. Start the server, correct the address, or raise cluster.start_timeout_seconds"
    )


def test_the_start_waits_for_a_server_whose_port_refuses_connections() -> None:
    loading, notes = LoadingServer([READY]), list[str]()

    async def wait() -> None:
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            loading.port = bound.getsockname()[1]
            servers = [Servers("rollout.urls", [loading.endpoint], "/health")]
            task = asyncio.create_task(wait_for_servers(servers, 60.0, notes.append))
            while not notes:
                await asyncio.sleep(0.02)
            bound.listen()
            async with await asyncio.start_server(loading.serve, sock=bound.dup()):
                await task

    asyncio.run(asyncio.wait_for(wait(), 60))
    assert "Connection refused" in notes[0] and len(notes) == 2


def test_the_start_does_not_wait_for_a_host_that_does_not_exist() -> None:
    servers = [Servers("rollout.urls", [Endpoint("http://no-such-host.invalid:1")], "/health")]
    notes: list[str] = []
    asyncio.run(asyncio.wait_for(wait_for_servers(servers, 600.0, notes.append), 60))
    assert not notes, "the start waited"


def test_a_cancelled_wait_ends_at_once() -> None:
    async def wait() -> None:
        notes: list[str] = []
        servers = [Servers("rollout.urls", [Endpoint("http://127.0.0.1:9")], "/health")]
        task = asyncio.create_task(wait_for_servers(servers, 600.0, notes.append))
        while not notes:
            await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 30)

    asyncio.run(wait())


@pytest.mark.parametrize("all_needed", [True, False])
def test_the_start_waits_for_all_servers_or_for_one_of_them_as_all_needed_says(all_needed: bool) -> None:
    loading, notes = LoadingServer([READY]), list[str]()

    async def wait() -> None:
        async with await asyncio.start_server(loading.serve, "127.0.0.1", 0) as server:
            loading.port = server.sockets[0].getsockname()[1]
            both = [loading.endpoint, Endpoint("http://127.0.0.1:9")]
            await wait_for_servers([Servers("rollout.urls", both, "/h", all_needed)], 0.5, notes.append)

    if all_needed:
        with pytest.raises(ClusterError, match=r"127\.0\.0\.1:9: Connection refused"):
            asyncio.run(wait())
    else:
        asyncio.run(wait())
        assert notes == []


def test_pauses_between_attempts_grow_and_add_up_to_the_time_limit() -> None:
    now = [100.0]
    wait = StartWait(20.0, lambda: now[0])
    pauses = []
    while (pause := wait.pause()) is not None:
        pauses.append(pause)
        now[0] += pause
    assert pauses[:5] == [0.25, 0.5, 1.0, 2.0, 4.0] and max(pauses) == 5.0
    assert sum(pauses) == wait.waited == 20.0


Tables = dict[str, Any]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda t: t["teachers"]["t"].update(urls=["http://a:1/v1/"]), {"teachers.t.urls": ("http://a:1", "/manifest", True)}),
        (lambda t: t["teachers"]["t"].update(urls=["http://a:1"], backend="vllm"), {"teachers.t.urls": ("http://a:1", "/v1/models", True)}),
        (
            lambda t: t.update(rollout={"engine": "vllm", "urls": ["http://b:1/"]}),
            {"teachers.t.urls": ("http://a:1", "/manifest", True), "rollout.urls": ("http://b:1", "/health", True)},
        ),
        (
            lambda t: t.update(rollout={"engine": "openai", "urls": ["http://b:1"], "live_weights": False}),
            {"teachers.t.urls": ("http://a:1", "/manifest", True), "rollout.urls": ("http://b:1", "/v1/models", False)},
        ),
    ],
)  # fmt: skip
def test_each_kind_of_server_is_asked_on_its_own_path(
    change: Callable[[Tables], object], expected: dict[str, tuple[str, str, bool]]
) -> None:
    tables: Tables = {
        "student": {"model": "s"},
        "teachers": {"t": {"model": "x", "placement": "external", "urls": ["http://a:1"]}},
        "data": {"train": "rows.jsonl"},
    }
    change(tables)
    parsed = parse_recipe(tables)
    found = running_servers(parsed.teachers, parsed.rollout)
    assert {one.key: (one.endpoints[0].url, one.path, one.all_needed) for one in found} == expected
