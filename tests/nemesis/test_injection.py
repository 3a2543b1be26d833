"""Faults of clock, flushes, disk and network reach the processes they are meant for, and end."""

from __future__ import annotations

import http.client
import http.server
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
from driver import processes_of
from injection import Injector
from network import Proxy
from schedules import Fault

ASK = """
import os, sys, time
file = open(sys.argv[1], "w")
for line in sys.stdin:
    try:
        if line.strip() == "write":
            file.write("x" * 100_000); file.flush()
        os.fsync(file.fileno()); flushed = "ok"
    except OSError as error:
        flushed = error.strerror
    print(int(time.time() - float(line)) if line.strip() != "write" else 0, flushed, flush=True)
"""


def test_clock_flushes_and_room_fail_and_recover(tmp_path: Path) -> None:
    injector = Injector(tmp_path, None)
    env = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).with_name("shim")),
        "UNDERSTUDY_NEMESIS_SHIM": str(injector.shim),
    }
    command = [sys.executable, "-c", ASK, str(tmp_path / "file")]
    with psutil.Popen(command, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:

        def ask(word: str = "") -> str:
            time.sleep(0.05)
            process.stdin.write(f"{word or time.time()}\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        assert ask() == "0 ok"
        assert injector.inject(Fault("clock", seconds=3600.0), process) == "clock"
        assert ask() == "3600 ok"
        injector.inject(Fault("failing fsync", seconds=60.0), process)
        assert ask() == "3600 Input/output error"
        injector.undo(everything=True)
        assert ask() == "3600 ok"
        injector.inject(Fault("full disk", seconds=60.0), process)
        assert ask("write") == "0 File too large"
        injector.undo(everything=True)
        assert ask("write") == "0 ok"
        process.kill()


def test_a_process_whose_title_hides_its_environment_is_known_by_its_open_files(tmp_path: Path) -> None:
    code = "import time; print(1, flush=True); time.sleep(60)"
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([sys.executable, "-c", code], env={}, stdout=log)
    try:
        assert [one.pid for one in processes_of(tmp_path)] == [process.pid]
    finally:
        process.kill()
        process.wait()
    assert processes_of(tmp_path) == []


@pytest.mark.parametrize("trouble", ["partition", "reset", "delay"])
def test_a_proxy_cuts_delays_and_heals(trouble: str) -> None:
    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    proxy = Proxy(f"http://127.0.0.1:{server.server_port}")

    def ask() -> float:
        place = urlsplit(proxy.url)
        connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=1.0)
        started = time.monotonic()
        try:
            connection.request("GET", "/")
            assert connection.getresponse().status == 200
        finally:
            connection.close()
        return time.monotonic() - started

    assert ask() < 0.5
    proxy.make(trouble)
    if trouble == "delay":
        assert ask() >= 0.3
    else:
        with pytest.raises((OSError, http.client.HTTPException)):
            ask()
    proxy.make("")
    assert ask() < 0.5
    proxy.close()
    server.shutdown()
