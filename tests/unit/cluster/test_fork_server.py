"""Children forked by the fork server. Most tests use a fork server that imports no modules."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from understudy.cluster import fork_server
from understudy.cluster.local import Child, LocalProcesses
from understudy.errors import ChildDied

CHILD = """
import argparse, json, os, random, sys
parser = argparse.ArgumentParser()
parser.add_argument("--ready-file"); parser.add_argument("--watch-fd", type=int)
options = parser.parse_args()
import numpy
print("said", flush=True); print("complained", file=sys.stderr, flush=True)
facts = {"cwd": os.getcwd(), "word": os.environ.get("WORD"), "main": __name__, "drawn": [float(numpy.random.random()), random.random()]}
facts["open"] = sorted(int(one) for one in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{one}"))
with open(options.ready_file + ".tmp", "w") as handle: json.dump(facts, handle)
os.replace(options.ready_file + ".tmp", options.ready_file)
os.read(options.watch_fd, 1)
"""


@pytest.fixture
def bare_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[fork_server.ForkServer]:
    (tmp_path / "forked_for_test.py").write_text(CHILD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    made = fork_server.ForkServer({"OMP_NUM_THREADS": "1"}, modules=())
    monkeypatch.setattr(fork_server, "_SERVER", made)
    yield made
    made.close()


def is_forked(child: Child) -> bool:
    return psutil.Process(child.process.pid).ppid() != os.getpid()


def test_a_forked_child_has_its_own_environment_log_file_descriptors_and_random_state(
    tmp_path: Path, bare_server: fork_server.ForkServer
) -> None:
    async def scenario() -> None:
        processes = LocalProcesses(tmp_path / "logs", start_timeout=20)
        env = {"OMP_NUM_THREADS": "1", "WORD": "ours"}
        one, two = [await processes.start(name, "forked_for_test", [], env) for name in ("one", "two")]
        assert is_forked(one) and is_forked(two)
        assert one.ready["cwd"] == str(tmp_path) and one.ready["main"] == "__main__"
        assert one.ready["word"] == "ours" and "WORD" not in os.environ
        assert not set(one.ready["drawn"]) & set(two.ready["drawn"])
        # Three standard streams and the pipe to the launcher; no descriptor of the fork server or of the other child.
        assert len(one.ready["open"]) == len(two.ready["open"]) == 4
        assert one.log.read_text().split() == ["said", "complained"]
        await processes.close()

    asyncio.run(scenario())


ENDS = """
import atexit, sys, threading, time
class Last:
    def __del__(self): print("collected", flush=True)
last = Last()
atexit.register(print, "atexit")
threading.Thread(target=lambda: (time.sleep(0.3), print("thread"))).start()
sys.exit({code})
"""


@pytest.mark.parametrize(
    ("code", "expected", "printed"), [("3", 3, ""), ("None", 0, ""), ("'why'", 1, "why ")]
)
def test_a_forked_child_exits_like_a_program_but_skips_the_last_garbage_collection(
    tmp_path: Path, bare_server: fork_server.ForkServer, code: str, expected: int, printed: str
) -> None:
    """The last collection visits all that was imported: 2 to 3 s with torch."""
    (tmp_path / "ends_for_test.py").write_text(ENDS.format(code=code))
    while not bare_server.ready():
        time.sleep(0.02)
    with (tmp_path / "log").open("wb") as log:
        child = bare_server.start(
            "ends_for_test", [], {**os.environ, "OMP_NUM_THREADS": "1"}, log.fileno(), None
        )
    assert child.wait(20) == expected
    assert (tmp_path / "log").read_text().split() == f"{printed}thread atexit".split()


def test_a_child_with_other_load_time_environment_variables_is_started_as_a_new_process(
    tmp_path: Path, bare_server: fork_server.ForkServer
) -> None:
    async def scenario() -> None:
        processes = LocalProcesses(tmp_path / "logs", start_timeout=20)
        other = await processes.start("one", "forked_for_test", [], {"OMP_NUM_THREADS": "2"})
        assert not is_forked(other)
        await processes.close()

    asyncio.run(scenario())


def test_children_outlive_a_killed_fork_server_and_later_ones_are_started_as_new_processes(
    tmp_path: Path, bare_server: fork_server.ForkServer
) -> None:
    async def scenario() -> None:
        processes = LocalProcesses(tmp_path / "logs", start_timeout=20)
        first = await processes.start("one", "forked_for_test", [], {"OMP_NUM_THREADS": "1"})
        bare_server._process.kill()
        bare_server._process.wait()
        second = await processes.start("two", "forked_for_test", [], {"OMP_NUM_THREADS": "1"})
        assert first.alive and second.alive and not is_forked(second)
        os.kill(first.process.pid, signal.SIGKILL)
        assert first.process.wait(10) == -signal.SIGKILL and not first.alive
        await processes.close()
        assert second.process.returncode is not None

    asyncio.run(scenario())


def test_a_lost_fork_server_is_removed_even_if_a_nested_one_was_used_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fork_server, "_SERVER", None)
    with fork_server.prepared({}, modules=()):
        lost = fork_server.current()
        assert lost is not None
        lost._process.kill()
        lost._process.wait()
        lost.ready()  # the next call raises the error
        with fork_server.prepared({}, modules=()):
            assert fork_server.current() not in (None, lost)
        assert fork_server.current() is None
    assert fork_server.current() is None


def test_a_stopped_fork_server_is_killed_and_the_child_is_started_as_a_new_process(
    tmp_path: Path, bare_server: fork_server.ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server, "_ANSWER_SECONDS", 1.0)

    async def scenario() -> None:
        processes = LocalProcesses(tmp_path / "logs", start_timeout=20)
        first = await processes.start("one", "forked_for_test", [], {"OMP_NUM_THREADS": "1"})
        bare_server._process.send_signal(signal.SIGSTOP)
        second = await processes.start("two", "forked_for_test", [], {"OMP_NUM_THREADS": "1"})
        assert bare_server.over and first.alive and not is_forked(second)
        assert (
            bare_server._process.wait(10) == -signal.SIGKILL
        )  # it must not fork another "two" when it wakes up
        await processes.close()

    asyncio.run(scenario())


def test_the_exit_of_a_child_is_noticed_while_its_fork_server_is_stopped(
    tmp_path: Path, bare_server: fork_server.ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise `close` would wait for a report that never comes."""
    monkeypatch.setattr(fork_server, "_REPORT_SECONDS_IF_STOPPED", 0.3)

    async def scenario() -> None:
        processes = LocalProcesses(tmp_path / "logs", start_timeout=20)
        child = await processes.start("one", "forked_for_test", [], {"OMP_NUM_THREADS": "1"})
        assert is_forked(child)
        bare_server._process.send_signal(signal.SIGSTOP)
        psutil.Process(child.process.pid).kill()
        assert child.process.wait(timeout=10) == -signal.SIGKILL
        bare_server._process.send_signal(signal.SIGCONT)
        await processes.close()

    asyncio.run(scenario())


def test_a_child_has_no_exit_code_until_its_busy_fork_server_reports_one(
    bare_server: fork_server.ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, when a busy machine gave the fork server no CPU for three seconds, an exit code of 2 was reported as
    SIGKILL."""
    monkeypatch.setattr(fork_server, "_REPORT_SECONDS_IF_STOPPED", 0.0)
    monkeypatch.setattr(bare_server, "_receive", lambda: None)  # no report has come yet
    exited = subprocess.Popen([sys.executable, "-c", ""])
    exited.wait()
    child = fork_server._Forked(exited.pid, bare_server)
    assert [child.poll(), child.poll()] == [None, None]
    bare_server._codes[exited.pid] = 2
    assert child.poll() == 2


def test_a_child_with_the_pid_of_an_earlier_one_has_its_own_deadline_for_the_exit_report(
    bare_server: fork_server.ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, a trainer that had ended with 0 was reported as killed, because a child an hour earlier had had the same
    pid."""
    monkeypatch.setattr(fork_server, "_REPORT_SECONDS", 0.3)
    monkeypatch.setattr(bare_server, "_receive", lambda: None)
    exited = subprocess.Popen([sys.executable, "-c", ""])
    exited.wait()
    earlier, later = (fork_server._Forked(exited.pid, bare_server) for _ in range(2))
    assert earlier.wait(10) == -signal.SIGKILL
    assert later.poll() is None
    bare_server._codes[exited.pid] = 0
    assert later.poll() == 0


def test_a_child_is_started_as_a_new_process_if_the_fork_server_does_not_get_ready_in_time(
    tmp_path: Path, bare_server: fork_server.ForkServer
) -> None:
    bare_server._process.send_signal(signal.SIGSTOP)

    async def scenario() -> None:
        processes = LocalProcesses(tmp_path / "logs", start_timeout=5)
        child = await processes.start("one", "forked_for_test", [], {"OMP_NUM_THREADS": "1"})
        assert not is_forked(child)
        await processes.close()

    asyncio.run(scenario())


def test_every_thread_that_waits_for_a_child_gets_its_exit_code(
    tmp_path: Path, bare_server: fork_server.ForkServer
) -> None:
    async def scenario() -> list[int]:
        processes = LocalProcesses(tmp_path / "logs", start_timeout=20)
        child = await processes.start("one", "forked_for_test", [], {"OMP_NUM_THREADS": "1"})
        found: list[int] = []
        threads = [threading.Thread(target=lambda: found.append(child.process.wait(20))) for _ in range(8)]
        for thread in threads:
            thread.start()
        os.kill(child.process.pid, signal.SIGKILL)
        await asyncio.gather(*(asyncio.to_thread(thread.join) for thread in threads))
        await processes.close()
        return found

    assert asyncio.run(scenario()) == [-signal.SIGKILL] * 8


def test_a_dead_child_is_not_reaped_until_its_exit_was_noticed(
    tmp_path: Path, bare_server: fork_server.ForkServer
) -> None:
    async def scenario() -> None:
        processes = LocalProcesses(tmp_path / "logs", start_timeout=20)
        child = await processes.start("one", "forked_for_test", [], {"OMP_NUM_THREADS": "1"})
        process = psutil.Process(child.process.pid)
        process.kill()
        while process.status() != psutil.STATUS_ZOMBIE:  # raises if it is reaped: its pid could be reused
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        assert process.status() == psutil.STATUS_ZOMBIE
        assert not child.alive
        with contextlib.suppress(psutil.NoSuchProcess):
            while process.status() == psutil.STATUS_ZOMBIE:
                await asyncio.sleep(0.01)
        await processes.close()

    asyncio.run(scenario())


def test_children_of_the_real_fork_server_find_torch_imported_and_compute_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "computes_for_test.py").write_text(
        CHILD.replace(
            "import numpy\n",
            "import sys; was = 'torch' in sys.modules\nimport numpy, torch\nassert was and torch.ones(64, 64).mm(torch.ones(64, 64)).sum() == 64**3\n",
        )
    )
    (tmp_path / "fails_for_test.py").write_text("raise RuntimeError('no such recipe')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    made = fork_server.ForkServer({}, modules=fork_server.MODULES)
    monkeypatch.setattr(fork_server, "_SERVER", made)

    async def scenario() -> None:
        processes = LocalProcesses(tmp_path / "logs", start_timeout=60)
        child = await processes.start("one", "computes_for_test", [])
        assert is_forked(child), json.dumps(child.ready)
        # The error is the last thing it prints: extension modules print no warnings of leaked objects after it.
        with pytest.raises(ChildDied, match=r"RuntimeError: no such recipe\n\(process two ended with code 1"):
            await processes.start("two", "fails_for_test", [])
        await processes.close()

    try:
        asyncio.run(scenario())
    finally:
        made.close()


def test_forking_is_allowed_without_a_gpu_driver_or_with_all_gpus_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(fork_server, "_GPU_DRIVER", tmp_path / "driver")
    assert fork_server.can_fork()
    (tmp_path / "driver").touch()
    assert not fork_server.can_fork()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert not fork_server.can_fork()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert fork_server.can_fork()


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="a file that is run alone has none")
def test_a_parallel_run_of_the_suite_has_a_working_fork_server() -> None:
    """Without it the suite still passes, but every command imports torch anew. It is lost as soon as a library starts a
    thread when it is imported."""
    server = fork_server.current()
    deadline = time.monotonic() + 120
    while server is not None and not server.ready() and not server.over:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert server is not None and server.ready(), (
        "it refuses to fork, because a module it imports starts a thread"
    )
