"""Connections without a complete request head are closed after a time limit and do not block other clients."""

import contextlib
import http.client
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

PROGRAM = """
import sys
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from understudy.serving import server
from understudy.serving.process import process_arguments, process_main

server.HEAD_SECONDS = float(sys.argv.pop(1))

async def hello(request):
    return PlainTextResponse("hello " + str(len(await request.body())))

async def body(process):
    sock = process.bind()
    print(sock.getsockname()[1], flush=True)
    await server.serve(process, Starlette(routes=[Route("/", hello, methods=["POST"])]), sock, what="a test")

sys.exit(process_main(body, process_arguments("program", None).parse_args()))
"""
FILES = 256


@pytest.fixture
def start() -> Iterator[Callable[..., int]]:
    children: list[subprocess.Popen[str]] = []

    def started(head_seconds: float, files: int | None = None) -> int:
        def limit() -> None:
            if files is not None:
                resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

        child = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(head_seconds)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, preexec_fn=limit, env=dict(os.environ),
        )  # fmt: skip
        children.append(child)
        assert child.stdout is not None
        port = int(child.stdout.readline())
        while child.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=10).close()
                break
            except ConnectionRefusedError:  # bound, but not listening yet
                time.sleep(0.05)
        return port

    yield started
    for child in children:
        child.terminate()
        _, errors = child.communicate(timeout=20)
        assert "Traceback" not in errors and len(errors) < 10_000, errors[:3000]


def answer_of(port: int, connection: http.client.HTTPConnection | None = None) -> str:
    connection = connection or http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("POST", "/", body=b"x" * 1000)
    return connection.getresponse().read().decode()


def half_open_connections(port: int, count: int) -> list[socket.socket]:
    found = []
    for _ in range(count):
        one = socket.create_connection(("127.0.0.1", port), timeout=10)
        one.sendall(b"GET /")
        found.append(one)
    return found


def test_the_server_answers_despite_more_half_open_connections_than_it_may_open_files(
    start: Callable[..., int],
) -> None:
    port = start(60.0, FILES)
    half_open = half_open_connections(port, FILES + 100)
    assert [answer_of(port) for _ in range(3)] == ["hello 1000"] * 3
    for one in half_open:
        one.close()


def test_a_connection_without_a_complete_request_head_is_closed_after_a_time_limit(
    start: Callable[..., int],
) -> None:
    port = start(0.5)
    half_open, without_a_byte = (
        half_open_connections(port, 5),
        socket.create_connection(("127.0.0.1", port), timeout=10),
    )
    for one in [*half_open, without_a_byte]:
        one.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            assert one.recv(1) == b"", "the server sent an answer"


def test_a_kept_alive_connection_is_not_closed_between_requests(start: Callable[..., int]) -> None:
    port = start(0.5)
    kept = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    assert answer_of(port, kept) == "hello 1000"
    time.sleep(1.0)  # longer than the limit for a request head
    assert answer_of(port, kept) == "hello 1000"
