"""A rank that lives and does nothing is noticed; a trainer that did not look takes nobody for dead."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from understudy.assembly import rank_heartbeat as rank_pulse
from understudy.assembly.rank_heartbeat import Pulse

RANK = """
import sys, time
from pathlib import Path
from understudy.assembly import rank_heartbeat as rank_pulse
rank_pulse._BEAT_S = 0.1
rank_pulse.beat(Path(sys.argv[1]), 1)
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


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_pulse, "_BEAT_S", 0.1)
    monkeypatch.setattr(rank_pulse, "_LONGEST_LOOK_S", 0.2)


def looked_at(pulse: Pulse, seconds: float) -> bool:
    """Whether the rank was found silent within this time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if pulse.silent(1):
            return True
        time.sleep(0.05)
    return False


def test_a_stopped_process_is_silent_and_a_living_one_is_not(tmp_path: Path, rank: psutil.Process) -> None:
    pulse = Pulse(tmp_path, silence_s=3.0)
    assert not looked_at(pulse, 4.0)
    rank.suspend()
    assert looked_at(pulse, 30.0)


def test_time_in_which_nobody_looked_does_not_count(tmp_path: Path, rank: psutil.Process) -> None:
    pulse = Pulse(tmp_path, silence_s=2.0)
    assert not pulse.silent(1)
    rank.suspend()
    time.sleep(3.0)
    assert not pulse.silent(1), "the trainer may have been stopped together with it"
    rank.resume()
    assert not looked_at(pulse, 1.0)


def test_one_that_has_not_begun_is_not_silent(tmp_path: Path) -> None:
    assert not looked_at(Pulse(tmp_path, silence_s=0.1), 0.5)
