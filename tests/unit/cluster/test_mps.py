"""NVIDIA's multi-process service: started before CUDA, ended with its process, removed if left behind.

A program of our own stands in for `nvidia-cuda-mps-control`; it starts a real daemon process and records its calls.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from understudy.cluster import mps
from understudy.config import parse_recipe
from understudy.planning.this_machine import seat_here
from understudy.run import gpu_sharing

STAND_IN = Path(__file__).with_name("mps_stand_in.py")
OWNER = """
import os, sys
from understudy.cluster import mps
print(mps.start(lambda: None), os.environ["CUDA_MPS_PIPE_DIRECTORY"], mps._ours.keeper.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts the stand-in on PATH, sets a temporary directory, and returns the file with the recorded calls."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / mps.CONTROL
    program.write_text(f"#!{sys.executable}\n{STAND_IN.read_text()}")
    program.chmod(0o755)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("MPS_CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(mps, "_DEFAULT_PIPES", str(tmp_path / "nothing"))
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    return tmp_path / "calls"


class Owner:
    """A process that starts the MPS daemon and waits."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        problem, pipes, keeper = self.process.stdout.readline().split()
        assert problem == "None"
        self.pipes, self.keeper = Path(pipes), int(keeper)
        self.daemon = int((self.pipes / "nvidia-cuda-mps-control.pid").read_text())


def commands(calls: Path) -> list[str]:
    return [" ".join(line.split()[3:]) for line in calls.read_text().splitlines()]


def wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize("killed", [False, True])
def test_the_mps_daemon_ends_when_the_process_that_started_it_exits_or_is_killed(
    calls: Path, killed: bool
) -> None:
    owner = Owner()
    assert (owner.pipes / "control").exists() and not is_gone(owner.daemon)
    assert owner.pipes.stat().st_mode & 0o777 == 0o700
    if killed:
        owner.process.kill()
    else:
        owner.process.communicate("")
    wait_until(lambda: not owner.pipes.exists())
    assert is_gone(owner.daemon)
    assert commands(calls) == ["-d", "quit -t 5"]
    for line in calls.read_text().splitlines():
        assert line.split()[:3] == [str(owner.pipes), str(owner.pipes / "log"), "all"]
    owner.process.wait()


@pytest.mark.parametrize("refuses", ["", "quit"])
def test_the_next_start_ends_an_mps_daemon_whose_owner_died_and_no_other(
    calls: Path, monkeypatch: pytest.MonkeyPatch, refuses: str
) -> None:
    """Even if the daemon does not answer `quit`."""
    abandoned, running = Owner(), Owner()
    os.kill(abandoned.keeper, signal.SIGKILL)
    wait_until(lambda: is_gone(abandoned.keeper))
    abandoned.process.kill()
    abandoned.process.wait()
    assert not is_gone(abandoned.daemon)
    monkeypatch.setenv("MPS_REFUSES", refuses)
    following = Owner()
    assert is_gone(abandoned.daemon) and not abandoned.pipes.exists()
    assert not is_gone(running.daemon) and (running.pipes / "control").exists()
    assert commands(calls) == ["-d", "-d", "quit -t 5", "-d"]
    for owner in (running, following):
        owner.process.kill()
        owner.process.wait()
        wait_until(lambda owner=owner: not owner.pipes.exists())  # type: ignore[misc]
        if not is_gone(owner.daemon):
            os.kill(owner.daemon, signal.SIGKILL)


def test_the_mps_daemon_is_ended_if_no_gpu_can_be_opened_through_it(calls: Path, tmp_path: Path) -> None:
    assert mps.start(lambda: "CUDA error 805") == "CUDA error 805"
    assert commands(calls) == ["-d", "quit -t 5"]
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ and list((tmp_path / "tmp").iterdir()) == []


def test_start_returns_the_reason_why_the_mps_daemon_did_not_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MPS_REFUSES", "-d")
    assert mps.start() == "nvidia-cuda-mps-control -d ended with code 1: cannot -d"
    assert list((tmp_path / "tmp").iterdir()) == []
    monkeypatch.setenv("PATH", "/nowhere")
    assert mps.start() == "nvidia-cuda-mps-control is not on PATH"


def notes(mps_key: str = "auto", mode: str = "fully_async") -> list[str]:
    recipe = parse_recipe(
        {
            "student": {"model": "org/student"},
            "teachers": {"math": {"model": "org/math", "replicas": 1}},
            "data": {"train": "x.jsonl"},
            "run": {"mps": mps_key},
            "trainer": {"mode": mode},
        }
    )
    return gpu_sharing.share_gpus(recipe.run, recipe.trainer.mode, recipe.cluster, partial(seat_here, recipe))


@pytest.fixture
def mps_starts(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Pretends that torch is built for CUDA; the list gets an entry when MPS is started."""
    found: list[bool] = []
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(mps, "start", lambda: found.append(True))
    return found


def test_a_run_whose_processes_share_a_gpu_starts_mps(mps_starts: list[bool]) -> None:
    (note,) = notes()
    assert mps_starts and note.startswith(
        "student and teacher-math share a GPU: NVIDIA's multi-process service"
    )


@pytest.mark.parametrize("why", ["off", "sync", "no GPU", "runs already", "CPU torch"])
def test_a_run_that_does_not_need_or_cannot_use_mps_neither_starts_nor_mentions_it(
    mps_starts: list[bool], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, why: str
) -> None:
    if why == "no GPU":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    elif why == "runs already":
        monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
        (tmp_path / "control").touch()
    elif why == "CPU torch":
        monkeypatch.setattr(torch.version, "cuda", None)
    assert notes("off" if why == "off" else "auto", "sync" if why == "sync" else "fully_async") == []
    assert not mps_starts


def test_a_run_that_cannot_start_mps_notes_the_reason_and_the_speedup_it_misses(
    mps_starts: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mps, "start", lambda: "nvidia-cuda-mps-control is not on PATH")
    (note,) = notes()
    assert "1.6 times as fast" in note and "not on PATH" in note
    monkeypatch.setattr(mps, "uses_cuda", lambda: True)
    (note,) = notes()
    assert "used CUDA before the run" in note
