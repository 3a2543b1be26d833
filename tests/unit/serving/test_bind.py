"""The addresses that servers bind, and the options of their sockets."""

import asyncio
import socket

import pytest

from understudy.serving.bind import StartError, bind_socket


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_accepted_connections_have_tcp_nodelay(host: str) -> None:
    """A reply is sent as head and body. Without TCP_NODELAY the body waits until the head is acknowledged: 40 ms on Linux."""

    async def scenario() -> int:
        found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted = writer.get_extra_info("socket")
            found.set_result(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        with _bound(host) as listening:
            async with await asyncio.start_server(connected, sock=listening):
                address, port = listening.getsockname()[:2]
                _, writer = await asyncio.open_connection(address, port)
                answer = await asyncio.wait_for(found, 10)
                writer.close()
        return answer

    assert asyncio.run(scenario())


def _bound(host: str) -> socket.socket:
    try:
        return bind_socket(f"{host}:0", None)
    except StartError:
        if ":" not in host:
            raise
        pytest.skip("no IPv6 here")


@pytest.mark.parametrize("bind", ["127.0.0.1", "127.0.0.1:http", "127.0.0.1:70000", ":8700"])
def test_an_invalid_address_is_refused_with_the_expected_form(bind: str) -> None:
    with pytest.raises(StartError, match="expected HOST:PORT"):
        bind_socket(bind, None)


def test_binding_beyond_loopback_is_refused_without_a_token() -> None:
    with pytest.raises(StartError, match="refused without a token"):
        bind_socket("0.0.0.0:0", None)
    bind_socket("0.0.0.0:0", "a token").close()
