"""A run started before its external teacher servers: it waits for them, and ends at once where waiting cannot help."""

import http.client
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from small_runs import call_cli, start_cli, write_toml

Make = Callable[..., dict[str, Any]]


class Gateway(ThreadingHTTPServer):
    """A proxy before a teacher's server: answers some requests with given statuses and forwards the rest."""

    daemon_threads = True

    def __init__(self, behind: str, statuses: dict[str, list[int]], for_ever: int = 0) -> None:
        """`statuses`: by a part of the path, each used for one request. `for_ever`: a status for every request."""
        self.behind, self.statuses, self.for_ever = urlsplit(behind), statuses, for_ever
        self.answered: list[tuple[str, int]] = []
        super().__init__(("127.0.0.1", 0), GatewayHandler, bind_and_activate=False)
        self.server_bind()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def status_for(self, path: str) -> int:
        waiting = (statuses for part, statuses in self.statuses.items() if part in path and statuses)
        return self.for_ever or next((statuses.pop(0) for statuses in waiting), 0)


class GatewayHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Gateway

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if status := self.server.status_for(self.path):
            self.answer(status, b"the model is loading", {})
            return
        behind = http.client.HTTPConnection(self.server.behind.hostname or "", self.server.behind.port)
        behind.request(self.command, self.path, body, dict(self.headers))
        reply = behind.getresponse()
        kept = {
            name: value
            for name, value in reply.getheaders()
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server")
        }
        self.answer(reply.status, reply.read(), kept)

    do_POST = do_GET

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.server.answered.append((self.path, status))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@contextmanager
def listening(gateway: Gateway) -> Iterator[None]:
    gateway.server_activate()
    thread = threading.Thread(target=gateway.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield
    finally:
        gateway.shutdown()
        gateway.server_close()


def recipe_with_teacher_url(recipe: Make, tmp_path: Path, name: str, url: str, **more: Any) -> Path:
    table = recipe(name, trainer__steps=1, **more)
    table["teachers"]["add"]["urls"] = [url]
    return write_toml(tmp_path / "recipe.toml", table)


def test_a_run_waits_for_a_teacher_server_that_starts_later_and_then_loads_its_model(
    recipe: Make, tmp_path: Path, teacher_urls: dict[str, str]
) -> None:
    """Connections are refused at first, then /manifest is answered with 503 and 502, then /v1/score with 429
    and 503."""
    gateway = Gateway(teacher_urls["add"], {"/manifest": [503, 502], "/v1/score": [429, 503]})
    path = recipe_with_teacher_url(recipe, tmp_path, "later", gateway.url)
    process = start_cli("train", str(path), fork=False)
    try:
        printed = []
        while not printed or "waiting up to" not in printed[-1]:
            printed.append(process.stdout.readline())  # type: ignore[union-attr]
            assert printed[-1], "".join(printed)
        with listening(gateway):
            output, _ = process.communicate(timeout=150)
    finally:
        process.kill()
    output = "".join(printed) + output
    assert process.returncode == 0, output
    waiting = f"teachers.add.urls: waiting up to 180 s (cluster.start_timeout_seconds) for {gateway.url}: Connection refused"
    assert output.count("waiting up to") == 1 and waiting in " ".join(output.split()), output
    assert output.count("Waiting up to 180 s") == 1 and "the model is loading" in output, output
    statuses = [status for path, status in gateway.answered if path in ("/manifest", "/v1/score")]
    assert [one for one in statuses if one != 200] == [503, 502, 429, 503]


def test_after_the_start_timeout_the_error_names_the_setting_and_no_run_directory_is_left(
    recipe: Make, tmp_path: Path, teacher_urls: dict[str, str]
) -> None:
    gateway = Gateway(teacher_urls["add"], {}, for_ever=503)
    with listening(gateway):
        path = recipe_with_teacher_url(
            recipe, tmp_path, "never", gateway.url, cluster__start_timeout_seconds=1.5
        )
        code, output = call_cli("train", str(path))
    said = " ".join(output.split())
    assert code == 2 and "Traceback" not in said
    assert (
        f"error: teachers.add.urls: no answer within 1.5 s (cluster.start_timeout_seconds); the last one of {gateway.url}: 503 the model "
        "is loading. Start the server, correct the address, or raise cluster.start_timeout_seconds" in said
    )
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize("status", [401, 404])
def test_a_teacher_server_that_answers_401_or_404_ends_the_start_at_once(
    recipe: Make, tmp_path: Path, teacher_urls: dict[str, str], status: int
) -> None:
    """The start timeout is far longer than the test's own timeout."""
    gateway = Gateway(teacher_urls["add"], {}, for_ever=status)
    with listening(gateway):
        path = recipe_with_teacher_url(
            recipe, tmp_path, "wrong", gateway.url, cluster__start_timeout_seconds=9e5
        )
        code, output = call_cli("train", str(path))
    assert code == 2 and str(status) in output and "aiting up to" not in output, output


def test_a_teacher_host_that_does_not_exist_ends_the_start_at_once(recipe: Make, tmp_path: Path) -> None:
    path = recipe_with_teacher_url(
        recipe, tmp_path, "wrong", "http://no-such-host.invalid:8000", cluster__start_timeout_seconds=9e5
    )
    code, output = call_cli("train", str(path))
    assert code == 2 and "error: teachers.add.urls: no server accepts connections at" in output, output


def test_sigint_ends_the_wait_for_a_teacher_server_at_once(recipe: Make, tmp_path: Path) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        path = recipe_with_teacher_url(
            recipe,
            tmp_path,
            "stopped",
            f"http://127.0.0.1:{bound.getsockname()[1]}",
            cluster__start_timeout_seconds=9e5,
        )
        process = start_cli("train", str(path), fork=False)
        try:
            printed = [""]
            while "waiting up to" not in printed[-1]:
                printed.append(process.stdout.readline())  # type: ignore[union-attr]
                assert printed[-1], "".join(printed)
            os.kill(process.pid, signal.SIGINT)
            output, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130 and "Traceback" not in output, output
    assert not (tmp_path / "stopped").exists()
