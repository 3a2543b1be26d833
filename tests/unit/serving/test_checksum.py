"""A body that is damaged in transit counts as a broken connection, in both directions."""

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
async def client_through_a_damaging_relay(
    damage_requests: bool, damage_answers: bool
) -> AsyncIterator[ServerClient]:
    """A client whose bodies lose a bit on the way to the server, or on the way back."""
    routes = [
        Route("/echo", answering(echo), methods=["POST"]),
        Route("/other", bare, methods=["POST"]),  # like a third-party server: no checksum
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
        await asyncio.gather(
            carry(reader, to_server[1], damage_requests), carry(to_server[0], writer, damage_answers)
        )

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


@pytest.mark.parametrize(("damage_requests", "damage_answers"), [(True, False), (False, True)])
def test_a_damaged_request_or_answer_raises_server_gone(damage_requests: bool, damage_answers: bool) -> None:
    async def scenario() -> None:
        async with client_through_a_damaging_relay(damage_requests, damage_answers) as client:
            which = "request" if damage_requests else "answer"
            with pytest.raises(ServerGone, match=f"/echo failed: .*the body of the {which} was damaged"):
                await client.ask("/echo", PAYLOAD)

    asyncio.run(scenario())


def test_an_intact_body_and_a_body_without_a_checksum_are_accepted() -> None:
    async def scenario() -> None:
        async with client_through_a_damaging_relay(damage_requests=False, damage_answers=False) as client:
            assert (await client.ask("/echo", PAYLOAD)).body == PAYLOAD
        async with client_through_a_damaging_relay(damage_requests=False, damage_answers=True) as client:
            assert (await client.ask("/other", PAYLOAD)).body == b"scorer of a row"

    asyncio.run(scenario())


def test_a_server_answers_a_damaged_request_with_its_own_status_and_advice_to_send_it_again() -> None:
    async def scenario() -> None:
        async with (
            client_through_a_damaging_relay(damage_requests=False, damage_answers=False) as client,
            aiohttp.ClientSession() as session,
        ):
            url = client.endpoint.url + "/echo"
            async with session.post(url, data=PAYLOAD, headers={HEADER: "00000000"}) as answer:
                assert answer.status == DAMAGED
                assert "send it again" in await answer.text()

    asyncio.run(scenario())
