"""Connections to one server: used again, bounded, dropped when they are spoilt; and what a request costs does not depend on the others."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpcore
import httpx
import pytest

from understudy.serving.connections import Connections

Answer = Callable[[bytes], Awaitable[bytes | None]]


class Server:
    """Answers each request with what `answer` makes of its path; None hangs up."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.opened = 0
        self.open_now = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.opened += 1
        self.open_now += 1
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
async def client_of(answer: Answer, **options: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Server]]:
    server = Server(answer)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    transport = Connections(**options)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", transport=transport) as client:
        yield client, server
    listening.close()


async def echo(path: bytes) -> bytes:
    return path


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 20))  # type: ignore[arg-type]


def test_one_after_another_takes_one_connection() -> None:
    async def scenario() -> None:
        async with client_of(echo) as (client, server):
            for number in range(5):
                response = await client.post(f"/{number}", content=b"x" * 100_000)
                assert response.text == f"/{number}" and response.status_code == 200
            assert server.opened == 1

    run(scenario)


def test_many_at_once_are_bounded_and_each_gets_its_own_answer() -> None:
    async def scenario() -> None:
        async def slowly(path: bytes) -> bytes:
            await asyncio.sleep(0.01)
            return path * 10_000

        async with client_of(slowly, most=5) as (client, server):
            answers = await asyncio.gather(*(client.post(f"/{number}", content=b"x") for number in range(40)))
            assert [one.text for one in answers] == [f"/{number}" * 10_000 for number in range(40)]
            assert server.opened <= 5

    run(scenario)


def test_what_a_request_costs_does_not_depend_on_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request looks at the connection it takes and at no other; httpx's own pool looks at all of them, twice."""
    looked = 0
    before = httpcore.AsyncHTTPConnection.has_expired

    def counted(connection: httpcore.AsyncHTTPConnection) -> bool:
        nonlocal looked
        looked += 1
        return before(connection)

    monkeypatch.setattr(httpcore.AsyncHTTPConnection, "has_expired", counted)

    async def scenario() -> None:
        async def together(path: bytes) -> bytes:
            await asyncio.sleep(0.1)
            return path

        async with client_of(together) as (client, _):
            for _ in range(2):
                await asyncio.gather(*(client.get(f"/{number}") for number in range(100)))

    run(scenario)
    assert looked <= 200


def test_a_connection_the_server_has_closed_is_not_used_again() -> None:
    async def scenario() -> None:
        async with client_of(echo) as (client, server):
            await client.get("/1")
            transport: Any = client._transport
            kept: Any = transport._idle[-1][0]
            kept._connection._network_stream._stream._transport.close()  # as when its server went away meanwhile
            await asyncio.sleep(0.05)
            assert (await client.get("/2")).text == "/2"
            assert server.opened == 2

    run(scenario)


def test_errors_have_the_names_whoever_asks_knows() -> None:
    async def scenario() -> None:
        async def moods(path: bytes) -> bytes | None:
            if path == b"/slow":
                await asyncio.sleep(5)
            return None if path == b"/rude" else path

        async with client_of(moods) as (client, server):
            with pytest.raises(httpx.RemoteProtocolError):
                await client.get("/rude")
            with pytest.raises(httpx.ReadTimeout):
                await client.get("/slow", timeout=0.1)
            assert (await client.get("/kind")).text == "/kind"
            assert server.opened == 3, "a spoilt connection is not used again"
        async with httpx.AsyncClient(transport=Connections()) as client:
            with pytest.raises(httpx.ConnectError):
                await client.get("http://127.0.0.1:1/")

    run(scenario)


def test_a_request_that_is_given_up_makes_room() -> None:
    async def scenario() -> None:
        async def stuck(path: bytes) -> bytes:
            if path == b"/stuck":
                await asyncio.sleep(60)
            return path

        async with client_of(stuck, most=1) as (client, server):
            waiting = asyncio.create_task(client.get("/stuck"))
            behind = asyncio.create_task(client.get("/behind"))
            await asyncio.sleep(0.05)
            waiting.cancel()
            assert (await behind).text == "/behind"
            async with client.stream("GET", "/half") as response:
                assert response.status_code == 200  # and its body is not wanted
            assert (await client.get("/next")).text == "/next"
            assert server.opened <= 3

    run(scenario)


def test_nobody_s_connection_stays_open_after_the_end_or_for_ever() -> None:
    async def scenario() -> None:
        async with client_of(echo, keepalive_s=0.05) as (client, server):
            await asyncio.gather(*(client.get(f"/{number}") for number in range(6)))
            most = server.open_now
            await asyncio.sleep(0.1)
            for number in range(6):
                await client.get(f"/{number}")
            await asyncio.sleep(0.05)
            assert server.open_now < most
        await asyncio.sleep(0.05)
        assert server.open_now == 0

    run(scenario)


def test_requests_that_are_there_when_it_ends_fail_in_known_words_and_leave_nothing_open() -> None:
    """Those under way, those that wait their turn, and those that have just taken a connection."""

    async def scenario() -> None:
        async def slow(path: bytes) -> bytes:
            await asyncio.sleep(0.01)
            return path

        for turns in range(1, 12):  # before the first turn it is httpx itself that refuses
            async with client_of(slow, most=3) as (client, server):
                await asyncio.gather(*(client.get("/first") for _ in range(3)))
                asked = [asyncio.create_task(client.get("/")) for _ in range(8)]
                for _ in range(turns):
                    await asyncio.sleep(0)
            outcomes = await asyncio.gather(*asked, return_exceptions=True)
            assert all(isinstance(one, httpx.HTTPError) for one in outcomes), outcomes
            while server.open_now:
                await asyncio.sleep(0.01)

    run(scenario)


def test_through_a_unix_socket(tmp_path: Path) -> None:
    async def scenario() -> None:
        server = Server(echo)
        listening = await asyncio.start_unix_server(server.serve, tmp_path / "s")
        transport = Connections(uds=str(tmp_path / "s"))
        async with httpx.AsyncClient(base_url="http://vllm", transport=transport) as client:
            assert (await client.get("/health")).text == "/health"
        listening.close()

    run(scenario)
