"""Injected faults (clock, flushes, disk, memory, network, signals) hit the intended processes, and end when undone."""

from __future__ import annotations

import http.client
import http.server
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
from checker import NO_MEMORY
from driver import processes_of
from injection import Injector, flush_library
from modes import ROLES
from network import Proxy
from schedules import Fault

PROBE = """
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


def test_clock_fsync_and_disk_faults_take_effect_and_are_undone(tmp_path: Path) -> None:
    injector = Injector(tmp_path, None)
    env = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).with_name("shim")),
        "UNDERSTUDY_NEMESIS_SHIM": str(injector.shim),
    }
    command = [sys.executable, "-c", PROBE, str(tmp_path / "file")]
    with psutil.Popen(command, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:

        def ask(word: str = "") -> str:
            time.sleep(0.05)
            process.stdin.write(f"{word or time.time()}\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        assert ask() == "0 ok"
        assert injector.inject(Fault("clock", seconds=3600.0), process) == "clock"
        assert ask() == "3600 ok"
        injector.inject(Fault("clock", seconds=3600.0, which=1), process)
        seen = set()
        until = time.monotonic() + 2
        while len(seen) < 2 and time.monotonic() < until:
            seen.add(ask())
        assert seen == {"0 ok", "3600 ok"}, "the clock should jump back and forth"
        injector.undo(everything=True)
        injector.inject(Fault("failing fsync", seconds=60.0), process)
        assert ask() == "3600 Input/output error"
        injector.undo(everything=True)
        assert ask() == "3600 ok"
        injector.inject(Fault("full disk", seconds=60.0), process)
        assert ask("write") == "0 File too large"
        injector.undo(everything=True)
        assert ask("write") == "0 ok"
        process.kill()


JOURNAL = """
import asyncio, sys
from pathlib import Path
from understudy.dataplane.embedded import EmbeddedDataPlane
from understudy.errors import DataPlaneError

async def main(folder, flag):
    plane = EmbeddedDataPlane.open(folder, max_rows=99, max_bytes=10**6, spill_bytes=10**6)
    await plane.put("train", {"a_0_0": {"reward": 1.0}})
    flag.touch()
    try:
        await plane.sync()
    except OSError as error:
        print("sync:", error.strerror)
    def failed(told):
        print("checkpoint:", told)
    plane._store.journal.on_failure = failed
    plane._store.journal._to_thread(plane._store.journal.writer.checkpoint, plane._store.journal._checkpointed)
    await asyncio.sleep(0.2)
    await plane.close()
    print("closed")
    flag.unlink()
    plane = EmbeddedDataPlane.open(folder, max_rows=99, max_bytes=10**6, spill_bytes=10**6)
    print(list(await plane.list("train")))
    await plane.close()

asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_failing_sqlite_flushes_are_reported_and_the_journal_keeps_its_rows(tmp_path: Path) -> None:
    """The error names the journal's file. Its log is complete, so the next open finds the row."""
    flag = tmp_path / "flag"
    env = {**os.environ, "LD_PRELOAD": flush_library(), "UNDERSTUDY_NEMESIS_FLUSH": str(flag)}
    command = [sys.executable, "-c", JOURNAL, str(tmp_path / "plane"), str(flag)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    sync, checkpoint, *rest = done.stdout.splitlines() or [done.stderr]
    assert sync == "sync: Input/output error", done
    assert f"{tmp_path}/plane/journal.sqlite cannot be checkpointed: disk I/O error" in checkpoint, done
    assert "free space or mend the disk" in checkpoint
    assert rest == ["closed", "['a_0_0']"], done


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_full_journal_is_reported_and_keeps_acknowledged_rows(tmp_path: Path) -> None:
    code = """
import asyncio, sys
from pathlib import Path
from understudy.dataplane.embedded import EmbeddedDataPlane
from understudy.errors import DataPlaneError

def opened(folder):
    return EmbeddedDataPlane.open(folder, max_rows=99, max_bytes=10**6, spill_bytes=10**6)

async def main(folder, flag):
    plane = opened(folder)
    await plane.put("train", {"a_0_0": {"reward": 1.0}})
    flag.touch()
    try:
        await plane.put("train", {"b_0_0": {"reward": 1.0}})
    except DataPlaneError as error:
        print(error)
    flag.unlink()
    await plane.close()
    plane = opened(folder)
    print(list(await plane.list("train")))
    await plane.close()

asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
"""
    flag = tmp_path / "flag"
    env = {**os.environ, "LD_PRELOAD": flush_library(), "UNDERSTUDY_NEMESIS_FLUSH": str(flag)}
    command = [sys.executable, "-c", code, str(tmp_path / "plane"), f"{flag}.full"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    message, rows = done.stdout.splitlines() or [done.stderr, ""]
    assert "journal.sqlite cannot be written: database or disk is full" in message, done
    assert rows == "['a_0_0']", done


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_journal_that_cannot_be_created_is_reported_and_can_be_created_later(tmp_path: Path) -> None:
    (flag := tmp_path / "flag").touch()
    code = """
import sys
from pathlib import Path
from understudy.dataplane.journal.schema import connect
from understudy.errors import DataPlaneError
for _ in range(2):
    try:
        print(connect(Path(sys.argv[1])).execute("SELECT COUNT(*) FROM rows").fetchall())
    except DataPlaneError as error:
        print(error)
    Path(sys.argv[2]).unlink(missing_ok=True)
"""
    env = {**os.environ, "LD_PRELOAD": flush_library(), "UNDERSTUDY_NEMESIS_FLUSH": str(flag)}
    command = [sys.executable, "-c", code, str(tmp_path / "journal.sqlite"), str(flag)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    message, then = done.stdout.splitlines() or [done.stderr, ""]
    assert "journal.sqlite cannot be written: disk I/O error; free space or mend the disk" in message, done
    assert then == "[(0,)]", done


def test_a_process_without_memory_gets_none_until_the_fault_ends(tmp_path: Path) -> None:
    code = """
import sys
for line in sys.stdin:
    try:
        print(len(bytearray(1 << 28)), flush=True)
    except MemoryError:
        print("none", flush=True)
"""
    injector = Injector(tmp_path, None)
    with psutil.Popen(
        [sys.executable, "-c", code], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:

        def ask() -> str:
            process.stdin.write("\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        assert ask() == str(1 << 28)
        assert injector.inject(Fault("no memory", seconds=60.0), process) == NO_MEMORY
        assert ask() == "none"
        injector.undo(everything=True)
        assert ask() == str(1 << 28)
        process.kill()


TREE = """
import subprocess, sys, time
program, code, *names = sys.argv[1:]
names and subprocess.Popen([names[0], "-c", code, program, code, *names[1:]], executable=program)
time.sleep(600)
"""


def start_process_chain(*names: str) -> list[psutil.Process]:
    """Starts a process, its child, its child's child and so on; each descendant has one of these names."""
    found: list[psutil.Process] = [psutil.Popen([sys.executable, "-c", TREE, sys.executable, TREE, *names])]
    while len(found) <= len(names) or found[-1].cmdline()[:1] != [names[-1]]:
        found += found[-1].children()
        time.sleep(0.02)
    return found


def test_freeze_waiting_suspends_the_processes_first_and_then_the_trainer(tmp_path: Path) -> None:
    trainer, replica = both = start_process_chain(*ROLES["replica"])
    injector, seen = Injector(tmp_path, None), [[False, False]]
    assert injector.inject(Fault("freeze waiting", "replica", seconds=2.0), trainer) == "freeze"
    while len(seen) < 5:
        injector.undo()
        now = [one.status() == psutil.STATUS_STOPPED for one in both]
        seen += [now] if seen[-1] != now else []
        time.sleep(0.02)
    replica.kill()
    trainer.kill()
    assert seen[1:] == [[False, True], [True, True], [True, False], [False, False]]


def test_faults_of_the_engine_role_hit_an_engine_process_that_also_scores(tmp_path: Path) -> None:
    trainer, engine = start_process_chain("understudy.assembly.processes.scoring_engine")
    assert Injector(tmp_path, None).inject(Fault("kill", "engine"), trainer) == "kill engine"
    while engine.status() != psutil.STATUS_ZOMBIE:  # its parent does not reap it
        time.sleep(0.02)
    trainer.kill()


def test_a_lost_machine_s_process_is_suspended_until_the_launch_is_over(tmp_path: Path) -> None:
    trainer, supervisor, worker = start_process_chain("ray::Supervisor", *ROLES["remote worker"])
    (injector := Injector(tmp_path, None)).inject(Fault("lost machine", "remote worker", which=1), trainer)
    while supervisor.status() != psutil.STATUS_ZOMBIE or worker.status() != psutil.STATUS_STOPPED:
        assert not injector.undo()
    injector.undo(everything=True)
    while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.02)
    trainer.kill()


def test_strangers_connect_to_a_port_and_close_when_the_fault_is_undone(tmp_path: Path) -> None:
    code = """
import socket, sys
server = socket.create_server(("127.0.0.1", 0))
print("listens", flush=True)
first, _ = server.accept()
print("came", flush=True)
while first.recv(4096):
    pass
print("left", flush=True)
"""
    injector = Injector(tmp_path, None)
    with psutil.Popen([sys.executable, "-c", code], text=True, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == "listens\n"
        assert injector.inject(Fault("strangers", seconds=60.0), process) == "strangers"
        assert process.stdout.readline() == "came\n"
        injector.undo(everything=True)
        assert process.stdout.readline() == "left\n"


def test_connections_between_processes_go_through_the_proxy(tmp_path: Path) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    code = """
import asyncio, sys
import aiohttp
async def main():
    timeout = aiohttp.ClientTimeout(total=1.0)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        for line in sys.stdin:
            try:
                async with session.head(f"http://127.0.0.1:{sys.argv[1]}/") as reply:
                    print(reply.status, flush=True)
            except (aiohttp.ClientError, TimeoutError) as error:
                print(type(error).__name__, flush=True)
asyncio.run(main())
"""
    proxy = Proxy()
    env = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).with_name("shim")),
        "UNDERSTUDY_NEMESIS_PROXY": str(proxy.port),
    }
    command = [sys.executable, "-c", code, str(server.server_port)]
    with psutil.Popen(command, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:

        def ask() -> str:
            process.stdin.write("\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        assert ask() == "200"
        proxy.make("partition")
        assert ask() == "TimeoutError"
        proxy.make("reset")
        assert ask() not in ("200", "TimeoutError")
        proxy.make("")
        assert ask() == "200"
        process.kill()
    proxy.close()
    server.shutdown()


def test_processes_of_finds_a_process_without_environment_by_its_open_files(tmp_path: Path) -> None:
    code = "import time; print(1, flush=True); time.sleep(60)"
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([sys.executable, "-c", code], env={}, stdout=log)
    try:
        assert [one.pid for one in processes_of(tmp_path)] == [process.pid]
    finally:
        process.kill()
        process.wait()
    assert processes_of(tmp_path) == []


def test_tear_leaves_the_files_of_a_trainer_that_had_already_ended(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (metrics := tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    injector = Injector(tmp_path, None)
    with psutil.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
        assert injector.inject(Fault("tear"), ended) is None
    assert metrics.read_text() == '{"step": 1}\n'
    with psutil.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as killed:
        assert injector.inject(Fault("tear"), killed) == "kill"
    assert metrics.read_text() != '{"step": 1}\n'


def server_behind_proxy(body: bytes) -> tuple[http.server.ThreadingHTTPServer, Proxy]:
    """A server that answers every request with this body, and a proxy before it."""

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server, Proxy(f"http://127.0.0.1:{server.server_port}")


@pytest.mark.parametrize("trouble", ["partition", "reset", "delay"])
def test_the_proxy_partitions_resets_or_delays_connections_until_it_is_undone(trouble: str) -> None:
    server, proxy = server_behind_proxy(b"")

    def ask() -> float:
        place = urlsplit(proxy.url)
        connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=2.0)
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


def test_the_proxy_damages_only_the_bodies_of_replies() -> None:
    server, proxy = server_behind_proxy(b"scores")

    def ask() -> bytes:
        place = urlsplit(proxy.url)
        connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=5.0)
        connection.request("GET", "/")
        answer = connection.getresponse()
        assert answer.status == 200
        return answer.read()

    assert ask() == b"scores"
    proxy.make("damage")
    damaged = [ask() for _ in range(5)]
    assert b"scores" not in damaged and {len(one) for one in damaged} == {6}
    proxy.make("")
    assert ask() == b"scores"
    proxy.close()
    server.shutdown()
