"""Spare processes: each becomes one child; a child for which none is left is a plain subprocess."""

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
from understudy.cluster.local import Child, LocalProcesses
from understudy.cluster.spare_processes import SpareProcesses, prepared_spares

CHILD = textwrap.dedent("""
    import argparse, json, os, sys
    parser = argparse.ArgumentParser()
    parser.add_argument("--ready-file"); parser.add_argument("--watch-fd", type=int)
    options = parser.parse_args()
    print("said"); print("complained", file=sys.stderr, flush=True)
    facts = {"imported": "colorsys" in sys.modules, "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"), "word": os.environ.get("WORD")}
    with open(options.ready_file + ".tmp", "w") as handle: handle.write(json.dumps(facts))
    os.replace(options.ready_file + ".tmp", options.ready_file)
    os.read(options.watch_fd, 1)
""")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "spare_for_test.py").write_text(CHILD)
    (tmp_path / "opens_cuda_for_test.py").write_text(
        "from understudy.cluster import fork_server_process\nfork_server_process.uses_cuda = lambda: True\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return tmp_path


@pytest.fixture
def spares(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SpareProcesses]:
    made = SpareProcesses({"OMP_NUM_THREADS": "1"}, 2, modules=("colorsys",))
    monkeypatch.setattr(fork_server, "_SERVER", made)
    yield made
    made.close()


async def start(processes: LocalProcesses, name: str, **env: str) -> Child:
    return await processes.start(name, "spare_for_test", [], {"OMP_NUM_THREADS": "1", **env})


def test_each_spare_process_becomes_one_child_with_its_own_gpus_and_log(
    folder: Path, spares: SpareProcesses
) -> None:
    async def scenario() -> None:
        processes = LocalProcesses(folder / "logs", start_timeout=20)
        children = await asyncio.gather(
            *(start(processes, str(gpu), CUDA_VISIBLE_DEVICES=str(gpu), WORD="ours") for gpu in range(3))
        )
        assert [child.ready["gpus"] for child in children] == ["0", "1", "2"]
        assert sorted(child.ready["imported"] for child in children) == [False, True, True]
        assert all(child.ready["word"] == "ours" for child in children) and "WORD" not in os.environ
        assert all(child.log.read_text().split() == ["said", "complained"] for child in children)
        assert spares.over and fork_server.current() is None
        await processes.close()
        assert all(child.process.returncode is not None for child in children)

    asyncio.run(scenario())


def test_a_child_with_other_load_time_environment_variables_uses_no_spare_process(
    folder: Path, spares: SpareProcesses
) -> None:
    async def scenario() -> None:
        processes = LocalProcesses(folder / "logs", start_timeout=20)
        assert not (await start(processes, "one", OMP_NUM_THREADS="2")).ready["imported"]
        assert not spares.over
        await processes.close()

    asyncio.run(scenario())


def test_a_spare_process_that_was_killed_is_skipped(folder: Path, spares: SpareProcesses) -> None:
    spares._left[0].process.kill()
    spares._left[0].process.wait()

    async def scenario() -> None:
        processes = LocalProcesses(folder / "logs", start_timeout=20)
        assert (await start(processes, "one")).ready["imported"]
        assert not (await start(processes, "two")).ready["imported"]
        await processes.close()

    asyncio.run(scenario())


def test_a_spare_process_that_has_opened_cuda_is_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA has already read its environment variables, and the child may be given other GPUs."""
    made = SpareProcesses({}, 1, modules=("opens_cuda_for_test",))
    deadline = time.monotonic() + 20
    while not made.over:
        assert not made.ready() and time.monotonic() < deadline
        time.sleep(0.02)


def test_unused_spare_processes_end_with_the_context_manager(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server, "_SERVER", None)
    with prepared_spares({}, 2, modules=()):
        assert fork_server.current() is None, "no spare processes where forking is allowed"
    monkeypatch.setattr(fork_server, "_GPU_DRIVER", folder / "spare_for_test.py")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with prepared_spares({}, 2, modules=()):
        left = fork_server.current()
        assert isinstance(left, SpareProcesses)
        pids = [spare.process.pid for spare in left._left]
        assert len(pids) == 2 and all(map(psutil.pid_exists, pids))
    assert not any(map(psutil.pid_exists, pids)) and fork_server.current() is None


def test_spare_processes_end_when_the_launcher_is_killed(folder: Path) -> None:
    launcher = textwrap.dedent("""
        import time
        from understudy.cluster.spare_processes import SpareProcesses
        spares = SpareProcesses({}, 1, modules=())
        print(spares._left[0].process.pid, flush=True)
        time.sleep(60)
    """)
    with subprocess.Popen([sys.executable, "-c", launcher], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        spare = psutil.Process(int(process.stdout.readline()))
        process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while spare.is_running() and spare.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)
