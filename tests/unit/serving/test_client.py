"""The client of one server: its connections are reused and bounded, and each kind of failure has its own error."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from understudy.serving.client import (
    Reply,
    ServerClient,
    ServerFailed,
    ServerGone,
    ServerRefused,
    ServerTimeout,
    retry_after,
)
from understudy.serving.endpoint import Endpoint
from understudy.serving.start_wait import is_lasting

Answer = Callable[[bytes], Awaitable[bytes | None]]


class Server:
    """Answers each request with `answer(path)`. None closes the connection."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.opened = 0
        self.open_now = 0
        self._writers: list[asyncio.StreamWriter] = []

    def hang_up(self) -> None:
        for writer in self._writers:
            writer.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.opened += 1
        self.open_now += 1
        self._writers.append(writer)
        try:
            while line := await reader.readline():
                while (header := await reader.readline()).strip():
                    if header.lower().startswith(b"content-length:"):
                        length = int(header.split(b":")[1])
                    elif header.lower().startswith(b"host:"):
                        length = 0
                await reader.readexactly(length)
                body = await self._answer(line.split()[1])
                if body is None:
                    return
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.open_now -= 1
            writer.close()


@asynccontextmanager
async def client_of(answer: Answer, **options: Any) -> AsyncIterator[tuple[ServerClient, Server]]:
    server = Server(answer)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    client = ServerClient("server", Endpoint(f"http://127.0.0.1:{port}"), **options)
    try:
        yield client, server
    finally:
        await client.close()
        listening.close()


async def get(client: ServerClient, path: str, **options: Any) -> str:
    return (await client.ask(path, method="GET", **options)).text


async def echo(path: bytes) -> bytes:
    return path


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 20))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("header", "clock", "seconds"),
    [
        ("120", None, 120.0),
        (" 1.5 ", None, 1.5),
        ("0", None, 0.0),
        ("Wed, 21 Oct 2015 07:28:00 GMT", "Wed, 21 Oct 2015 07:27:15 GMT", 45.0),
        ("Wed, 21 Oct 2015 07:28:00 -0000", "Wed, 21 Oct 2015 07:27:15 GMT", 45.0),
        ("Wed, 21 Oct 2015 07:28:00 GMT", "Wed, 21 Oct 2015 07:29:00 GMT", 0.0),
        ("Wed, 21 Oct 2015 07:28:00 GMT", None, 0.0),
        ("9" * 400, None, float("inf")),
        ("-3", None, None),
        ("nan", None, None),
        ("soon", None, None),
        ("", None, None),
    ],
)
def test_retry_after_reads_seconds_and_dates(header: str, clock: str | None, seconds: float | None) -> None:
    assert retry_after({"Retry-After": header} | ({"Date": clock} if clock else {})) == seconds


def test_a_retry_after_date_without_a_date_header_is_compared_with_the_local_clock() -> None:
    found = retry_after({"Retry-After": formatdate(time.time() + 60, usegmt=True)})
    assert found is not None and 50 < found <= 60


@pytest.mark.parametrize(("status", "seconds"), [(429, 7.0), (503, 7.0), (500, None), (200, None)])
def test_retry_after_is_read_from_429_and_503_answers_only(status: int, seconds: float | None) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 %d X\r\nretry-after: 7\r\ncontent-length: 0\r\n\r\n" % status)
        await writer.drain()
        writer.close()

    async def scenario() -> None:
        listening = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        client = ServerClient("server", Endpoint(f"http://127.0.0.1:{port}"))
        reply = await client.request("/", method="GET")
        await client.close()
        listening.close()
        assert (reply.status, reply.retry_after) == (status, seconds)

    run(scenario)


def test_sequential_requests_use_one_connection() -> None:
    async def scenario() -> None:
        async with client_of(echo) as (client, server):
            for number in range(5):
                response = await client.ask(f"/{number}", b"x" * 100_000)
                assert response.text == f"/{number}" and response.status == 200
            assert server.opened == 1

    run(scenario)


def test_concurrent_requests_use_at_most_the_given_number_of_connections() -> None:
    async def scenario() -> None:
        async def slowly(path: bytes) -> bytes:
            await asyncio.sleep(0.01)
            return path * 10_000

        async with client_of(slowly, most=5) as (client, server):
            answers = await asyncio.gather(*(client.ask(f"/{number}", b"x") for number in range(40)))
            assert [one.text for one in answers] == [f"/{number}" * 10_000 for number in range(40)]
            assert server.opened <= 5

    run(scenario)


def test_a_connection_that_the_server_has_closed_is_not_used_again() -> None:
    async def scenario() -> None:
        async with client_of(echo) as (client, server):
            await get(client, "/1")
            server.hang_up()
            await asyncio.sleep(0.05)
            assert (await client.ask("/2", b"x")).text == "/2"
            assert server.opened == 2

    run(scenario)


def test_disconnects_timeouts_and_closed_clients_raise_their_own_errors() -> None:
    async def scenario() -> None:
        async def respond(path: bytes) -> bytes | None:
            if path == b"/slow":
                await asyncio.sleep(5)
            return None if path == b"/rude" else path

        async with client_of(respond) as (client, server):
            with pytest.raises(ServerGone, match="server: /rude failed: ServerDisconnectedError"):
                await client.ask("/rude", b"x")
            with pytest.raises(ServerTimeout, match=r"server: no answer to /slow within 0\.1 s"):
                await get(client, "/slow", timeout_s=0.1)
            assert await get(client, "/kind") == "/kind"
            assert server.opened == 3, "a failed connection was used again"
            assert not await client.answers(0.1, "/slow") and not await client.answers(1.0, "/rude")
        with pytest.raises(ServerGone, match="its connections were closed"):
            await get(client, "/late")
        nowhere = ServerClient("server", Endpoint("http://127.0.0.1:1"))
        with pytest.raises(ServerGone, match="ClientConnectorError"):
            await get(nowhere, "/")
        await nowhere.close()

    run(scenario)


@pytest.mark.parametrize(
    ("body", "reason", "ours"),
    [
        (b'{"error": {"kind": "k", "message": "too long"}}', "too long", True),
        (b'{"error": "no model"}', "no model", False),
        (b'{"object": "error", "message": "bad k"}', "bad k", True),
        (b"<html>  busy\n</html>", "<html> busy </html>", False),
        (b"[1]", "[1]", False),
        (b"\xff", "\ufffd", False),
    ],
)
def test_the_reason_of_a_refusal_is_read_from_the_usual_forms(body: bytes, reason: str, ours: bool) -> None:
    client = ServerClient("server", Endpoint("http://127.0.0.1:1"))
    for status, kind in ((400, ServerRefused), (503, ServerFailed), (302, ServerFailed)):
        reply = Reply(status, body, "application/json")
        error = client.refusal("/v1/score", reply)
        assert type(error) is kind and f"({status}): {reason}" in str(error)
        assert reply.ours is ours


def test_give_up_fails_all_waiting_requests_at_once() -> None:
    """A machine that loses power closes no connection, so requests to it would wait forever."""

    async def scenario() -> None:
        async def never(path: bytes) -> bytes:
            await asyncio.sleep(60)
            return path

        async with client_of(never, most=2) as (client, _):
            asked = [asyncio.create_task(get(client, f"/{number}")) for number in range(4)]
            await asyncio.sleep(0.05)
            client.give_up("the machine is gone")
            outcomes = await asyncio.gather(*asked, return_exceptions=True)
            assert [str(one) for one in outcomes] == ["the machine is gone"] * 4
            assert all(isinstance(one, ServerGone) for one in outcomes)

    run(scenario)


def test_a_cancelled_request_frees_its_connection_for_the_next() -> None:
    async def scenario() -> None:
        async def stuck(path: bytes) -> bytes:
            if path == b"/stuck":
                await asyncio.sleep(60)
            return path

        async with client_of(stuck, most=1) as (client, server):
            stuck_request = asyncio.create_task(get(client, "/stuck"))
            queued_request = asyncio.create_task(get(client, "/behind"))
            await asyncio.sleep(0.05)
            stuck_request.cancel()
            assert await queued_request == "/behind"
            assert await get(client, "/next") == "/next"
            assert server.opened <= 3

    run(scenario)


def test_idle_connections_are_closed_after_keep_alive_and_all_when_the_client_closes() -> None:
    async def scenario() -> None:
        async with client_of(echo, keep_alive_s=0.05) as (client, server):
            await asyncio.gather(*(get(client, f"/{number}") for number in range(6)))
            most = server.open_now
            await asyncio.sleep(0.1)
            for number in range(6):
                await get(client, f"/{number}")
            await asyncio.sleep(0.05)
            assert server.open_now < most
        await asyncio.sleep(0.05)
        assert server.open_now == 0

    run(scenario)


def test_closing_the_client_fails_pending_requests_with_server_gone_and_closes_all_connections() -> None:
    """Requests that are running, that wait for a connection, and that have just taken one."""

    async def scenario() -> None:
        async def slow(path: bytes) -> bytes:
            await asyncio.sleep(0.01)
            return path

        for turns in range(12):
            async with client_of(slow, most=3) as (client, server):
                await asyncio.gather(*(get(client, "/first") for _ in range(3)))
                asked = [asyncio.create_task(get(client, "/")) for _ in range(8)]
                for _ in range(turns):
                    await asyncio.sleep(0)
            outcomes = await asyncio.gather(*asked, return_exceptions=True)
            assert all(isinstance(one, ServerGone) for one in outcomes), outcomes
            while server.open_now:
                await asyncio.sleep(0.01)

    run(scenario)


def test_a_request_goes_through_a_unix_socket(tmp_path: Path) -> None:
    async def scenario() -> None:
        server = Server(echo)
        listening = await asyncio.start_unix_server(server.serve, tmp_path / "s")
        client = ServerClient("vLLM", Endpoint("http://vllm", socket=str(tmp_path / "s")))
        assert await get(client, "/health") == "/health"
        await client.close()
        listening.close()

    run(scenario)


@pytest.mark.parametrize(
    "url", ["http://user:secret@127.0.0.1:9", "http://127.0.0.1:99999", f"http://{'a' * 70}.example:9"]
)
def test_an_unusable_address_is_a_lasting_error_that_does_not_show_the_password(url: str) -> None:
    async def scenario() -> None:
        client = ServerClient("gateway", Endpoint(url, "k3y"))
        with pytest.raises(ServerGone, match="gateway: /health failed: its address cannot be used") as raised:
            await get(client, "/health")
        assert is_lasting(raised.value) and "secret" not in str(raised.value)
        await client.close()

    run(scenario)
