"""`LocalProcesses` with real children: start, stop, and no child that outlives its run, however the launcher ends."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from understudy.cluster import fork_server
from understudy.cluster.local import LocalProcesses
from understudy.cluster.spare_processes import SpareProcesses
from understudy.errors import ChildDied, ClusterError

CHILD = textwrap.dedent("""
    import argparse, json, os, sys, threading, time
    parser = argparse.ArgumentParser()
    parser.add_argument("--ready-file"); parser.add_argument("--watch-fd", type=int)
    parser.add_argument("--how", default="serve")
    options = parser.parse_args()
    if options.how == "die":
        print("the model folder is missing"); sys.exit(7)
    def watch():
        os.read(options.watch_fd, 1); os._exit(0)
    threading.Thread(target=watch, daemon=True).start()
    if options.how == "stubborn":
        import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if options.how != "silent":
        with open(options.ready_file + ".tmp", "w") as handle: handle.write(json.dumps({"url": "here", "pid": os.getpid()}))
        os.replace(options.ready_file + ".tmp", options.ready_file)
    time.sleep(60)
""")


@pytest.fixture
def child_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "child_for_test.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return "child_for_test"


@pytest.fixture(params=["started", "forked", "spare"], autouse=True)
def process_source(
    request: pytest.FixtureRequest, child_module: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[fork_server.ProcessSource | None]:
    """Runs each test with children started as programs (None), forked by a fork server, and made from spare processes."""
    source: fork_server.ProcessSource | None = None
    if request.param == "forked":
        source = fork_server.ForkServer({}, modules=())
    elif request.param == "spare":
        source = SpareProcesses({}, 1, modules=())
    monkeypatch.setattr(fork_server, "_SERVER", source)
    yield source
    if source is not None:
        source.close()


def is_gone(pid: int, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


def test_a_child_becomes_ready_in_a_session_of_its_own_and_ends_on_close(
    tmp_path: Path, child_module: str, process_source: fork_server.ProcessSource | None
) -> None:
    async def scenario() -> int:
        processes = LocalProcesses(tmp_path / "logs", start_timeout=20)
        child = await processes.start("one", child_module, [])
        assert child.alive and child.ready["url"] == "here"
        started_process = psutil.Process(child.process.pid)
        assert (started_process.ppid() == os.getpid()) is not isinstance(
            process_source, fork_server.ForkServer
        ) and os.getsid(started_process.pid) == started_process.pid
        assert {"-m", child_module} <= set(started_process.cmdline())
        with pytest.raises(ClusterError, match="runs already"):
            await processes.start("one", child_module, [])
        await processes.close()
        return int(child.ready["pid"])

    assert is_gone(asyncio.run(scenario()))


def test_kill_now_ends_a_child_that_ignores_sigterm(tmp_path: Path, child_module: str) -> None:
    async def scenario() -> int:
        processes = LocalProcesses(tmp_path / "logs", start_timeout=20)
        child = await processes.start("one", child_module, ["--how", "stubborn"])
        processes.kill_now()
        child.process.wait(10)
        return int(child.ready["pid"])

    assert is_gone(asyncio.run(scenario()))


def test_a_child_that_ignores_sigterm_is_killed_when_its_stop_is_cancelled(
    tmp_path: Path, child_module: str
) -> None:
    async def body() -> None:
        processes = LocalProcesses(tmp_path / "logs")
        child = await processes.start("one", child_module, ["--how", "stubborn"])
        stopping = asyncio.create_task(processes.stop("one"))
        await asyncio.sleep(0.2)
        stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopping
        assert child.process.returncode == -signal.SIGKILL
        await processes.close()

    asyncio.run(body())


def test_the_error_of_a_child_that_dies_at_its_start_begins_with_the_childs_own_message(
    tmp_path: Path, child_module: str
) -> None:
    async def scenario() -> None:
        processes = LocalProcesses(tmp_path / "logs", start_timeout=20)
        try:
            await processes.start("one", child_module, ["--how", "die"])
        finally:
            await processes.close()

    with pytest.raises(ChildDied) as caught:
        asyncio.run(scenario())
    assert str(caught.value).startswith("the model folder is missing") and "code 7" in str(caught.value)


def test_start_raises_and_stops_a_child_that_never_gets_ready(tmp_path: Path, child_module: str) -> None:
    async def scenario() -> int:
        processes = LocalProcesses(tmp_path / "logs", start_timeout=1.5)
        with pytest.raises(ClusterError, match="not ready after"):
            await processes.start("one", child_module, ["--how", "silent"])
        assert not processes.children
        await processes.close()
        return 0

    assert asyncio.run(scenario()) == 0


def test_children_and_fork_server_end_when_the_launcher_is_killed(
    tmp_path: Path, child_module: str, process_source: fork_server.ProcessSource | None
) -> None:
    name = None if process_source is None else type(process_source).__name__
    launcher = textwrap.dedent(f"""
        import asyncio
        from pathlib import Path
        from understudy.cluster import fork_server
        from understudy.cluster.local import LocalProcesses
        from understudy.cluster.spare_processes import SpareProcesses
        async def main():
            if {name!r} == "ForkServer":
                fork_server._SERVER = fork_server.ForkServer({{}}, modules=())
                print(fork_server._SERVER._process.pid, flush=True)
            elif {name!r} == "SpareProcesses":
                fork_server._SERVER = SpareProcesses({{}}, 2, modules=())
                print(fork_server._SERVER._left[-1].process.pid, flush=True)
            processes = LocalProcesses(Path({str(tmp_path / "logs")!r}), start_timeout=20)
            child = await processes.start("one", {child_module!r}, [])
            print(child.ready["pid"], flush=True)
            await asyncio.sleep(60)
        asyncio.run(main())
    """)
    process = subprocess.Popen([sys.executable, "-c", launcher], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pids = [int(process.stdout.readline()) for _ in range(1 if process_source is None else 2)]
    assert all(map(psutil.pid_exists, pids))
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert all(map(is_gone, pids))


def test_a_file_in_the_working_directory_does_not_shadow_a_standard_library_module(
    tmp_path: Path,
    child_module: str,
    process_source: fork_server.ProcessSource | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The `understudy` program does not import from there, so a user's `argparse.py` was noticed only when a child
    started."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "argparse.py").write_text("raise ImportError('a script of the user')\n")
    monkeypatch.chdir(tmp_path / "work")
    # A new fork server, started in this working directory.
    source = fork_server.ForkServer({}, modules=()) if process_source is not None else None
    monkeypatch.setattr(fork_server, "_SERVER", source)

    async def scenario() -> None:
        processes = LocalProcesses(tmp_path / "logs", start_timeout=20)
        child = await processes.start("one", child_module, [])
        assert psutil.pid_exists(int(child.ready["pid"]))
        await processes.close()

    asyncio.run(scenario())
    if source is not None:
        source.close()
