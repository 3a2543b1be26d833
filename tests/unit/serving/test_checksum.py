"""A body that is damaged on its way is told as a broken connection, in both directions."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from understudy.serving.checksum import DAMAGED, HEADER
from understudy.serving.client import ServerClient, ServerGone
from understudy.serving.endpoint import Endpoint
from understudy.serving.http import answering, read_body

PAYLOAD = b"scores of a row"


async def echo(http: Request) -> Response:
    return Response(await read_body(http, 1 << 20))


async def bare(http: Request) -> Response:
    return Response(await http.body())


@asynccontextmanager
async def by_relay(asks: bool, answers: bool) -> AsyncIterator[ServerClient]:
    """A client whose bodies lose a bit on the way to the server, or on the way back."""
    routes = [
        Route("/echo", answering(echo), methods=["POST"]),
        Route("/other", bare, methods=["POST"]),  # as a server that is not ours: no checksum
    ]
    server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), port=0, log_level="error"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, damage: bool) -> None:
        while piece := await reader.read(1 << 16):
            writer.write(piece.replace(b"scores", b"scorer") if damage else piece)
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_server = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(carry(reader, to_server[1], asks), carry(to_server[0], writer, answers))

    relay = await asyncio.start_server(accept, "127.0.0.1", 0)
    client = ServerClient(
        "the server", Endpoint(f"http://127.0.0.1:{relay.sockets[0].getsockname()[1]}"), timeout_s=5
    )
    try:
        yield client
    finally:
        await client.close()
        relay.close()
        server.should_exit = True
        await serving


@pytest.mark.parametrize(("asks", "answers"), [(True, False), (False, True)])
def test_a_damaged_body_is_a_broken_connection(asks: bool, answers: bool) -> None:
    async def scenario() -> None:
        async with by_relay(asks, answers) as client:
            which = "request" if asks else "answer"
            with pytest.raises(ServerGone, match=f"/echo failed: .*the body of the {which} was damaged"):
                await client.ask("/echo", PAYLOAD)

    asyncio.run(scenario())


def test_a_whole_body_passes_and_one_without_a_checksum_is_taken() -> None:
    async def scenario() -> None:
        async with by_relay(asks=False, answers=False) as client:
            assert (await client.ask("/echo", PAYLOAD)).body == PAYLOAD
        async with by_relay(asks=False, answers=True) as client:
            assert (await client.ask("/other", PAYLOAD)).body == b"scorer of a row"

    asyncio.run(scenario())


def test_a_server_says_that_the_request_was_damaged() -> None:
    async def scenario() -> None:
        async with by_relay(asks=False, answers=False) as client, aiohttp.ClientSession() as session:
            url = client.endpoint.url + "/echo"
            async with session.post(url, data=PAYLOAD, headers={HEADER: "00000000"}) as answer:
                assert answer.status == DAMAGED
                assert "send it again" in await answer.text()

    asyncio.run(scenario())
