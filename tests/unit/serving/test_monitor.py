"""The monitor reports a rank that is alive and stalled, but not after the trainer itself was suspended."""

import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from understudy.errors import GivenUp, RankLost
from understudy.serving.supervisor import Monitor, newest_mark

RANK = """
import sys, time
from pathlib import Path
from understudy.serving import supervisor
supervisor.BEAT_S = 0.1
supervisor.beat(Path(sys.argv[1]) / "mark")
time.sleep(60)
"""


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[psutil.Process]:
    process = subprocess.Popen([sys.executable, "-c", RANK, str(tmp_path)])
    try:
        while not list(tmp_path.iterdir()):
            assert process.poll() is None
            time.sleep(0.02)
        yield psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


def monitor_of(folder: Path, silence_s: float) -> Monitor:
    monitor = Monitor(RankLost, beat_s=0.1, silence_s=silence_s)
    child: Any = SimpleNamespace(alive=True, log=folder / "log")
    monitor.add(1, "rank 1 of 2", child, partial(newest_mark, folder / "mark"))
    return monitor


def found_silent(monitor: Monitor, seconds: float) -> bool:
    """Whether the rank was found silent within this time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if monitor.lost() is not None:
            return True
        time.sleep(0.05)
    return False


def test_the_monitor_reports_a_suspended_process_and_not_a_running_one(
    tmp_path: Path, rank: psutil.Process
) -> None:
    monitor = monitor_of(tmp_path, silence_s=3.0)
    assert not found_silent(monitor, 4.0)
    rank.suspend()
    assert found_silent(monitor, 30.0)
    assert "rank 1 of 2 lives and has done nothing for 3 s" in str(monitor.lost())


def test_silence_while_the_trainer_itself_did_not_look_does_not_count(
    tmp_path: Path, rank: psutil.Process
) -> None:
    monitor = monitor_of(tmp_path, silence_s=2.0)
    assert monitor.lost() is None
    rank.suspend()
    time.sleep(3.0)
    assert monitor.lost() is None, "the trainer may have been suspended together with the rank"
    rank.resume()
    assert not found_silent(monitor, 1.0)


def test_a_process_without_a_first_heartbeat_is_not_reported(tmp_path: Path) -> None:
    assert not found_silent(monitor_of(tmp_path, silence_s=0.1), 0.5)


def test_the_timeout_of_stop_soon_counts_from_the_call(tmp_path: Path, rank: psutil.Process) -> None:
    monitor = monitor_of(tmp_path, silence_s=60.0)
    given_up: list[str] = []
    rank.suspend()
    assert not found_silent(monitor, 1.0)
    monitor.stop_soon(1.0, lambda: given_up.append("now"))
    assert not found_silent(monitor, 0.5) and found_silent(monitor, 30.0)
    assert isinstance(monitor.lost(), GivenUp) and given_up == ["now"]
