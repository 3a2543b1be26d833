"""Connections that send no request head: they end by themselves, and a client is served all the while."""

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
            except ConnectionRefusedError:  # bound, and does not listen yet
                time.sleep(0.05)
        return port

    yield started
    for child in children:
        child.terminate()
        _, errors = child.communicate(timeout=20)
        assert "Traceback" not in errors and len(errors) < 10_000, errors[:3000]


def asked(port: int, connection: http.client.HTTPConnection | None = None) -> str:
    connection = connection or http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("POST", "/", body=b"x" * 1000)
    return connection.getresponse().read().decode()


def dripping(port: int, count: int) -> list[socket.socket]:
    found = []
    for _ in range(count):
        one = socket.create_connection(("127.0.0.1", port), timeout=10)
        one.sendall(b"GET /")
        found.append(one)
    return found


def test_more_half_open_connections_than_files_do_not_make_the_server_deaf(start: Callable[..., int]) -> None:
    port = start(60.0, FILES)
    silent = dripping(port, FILES + 100)
    assert [asked(port) for _ in range(3)] == ["hello 1000"] * 3
    for one in silent:
        one.close()


def test_a_head_that_does_not_end_is_given_up(start: Callable[..., int]) -> None:
    port = start(0.5)
    silent, wordless = dripping(port, 5), socket.create_connection(("127.0.0.1", port), timeout=10)
    for one in [*silent, wordless]:
        one.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            assert one.recv(1) == b"", "the server says nothing"


def test_a_connection_that_is_kept_between_requests_is_not_given_up(start: Callable[..., int]) -> None:
    port = start(0.5)
    kept = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    assert asked(port, kept) == "hello 1000"
    time.sleep(1.0)  # longer than a head may take
    assert asked(port, kept) == "hello 1000"
