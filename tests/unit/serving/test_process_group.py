"""A process group is signalled only before its leader is waited for, because its number may be reused afterwards."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from understudy.errors import ConfigError
from understudy.planning.reward_check import _tried
from understudy.rollout.tools.base import ToolOutcome
from understudy.rollout.tools.sandbox import Isolation, Sandbox
from understudy.rollout.tools.workers import FunctionWorkers
from understudy.serving.process_group import end_group, has_ended, signal_group


@pytest.fixture
def signalled(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each signal to a group, whether its leader existed: as a process, or as a zombie that reserves the number."""
    found: list[bool] = []
    killpg = os.killpg

    def seen(group: int, number: int) -> None:
        found.append(psutil.pid_exists(group))
        killpg(group, number)

    monkeypatch.setattr(os, "killpg", seen)
    return found


def leader(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)


def wait_for_end(process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 20
    while not has_ended(process):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_end_group_ends_the_children_of_a_leader_that_has_exited_and_returns_its_exit_code(
    signalled: list[bool],
) -> None:
    process = leader(
        "import os, subprocess, sys\n"
        "print(subprocess.Popen(['sleep', '777'], stdout=subprocess.DEVNULL).pid, flush=True)\n"
        "os._exit(7)"
    )
    assert process.stdout is not None
    child = psutil.Process(int(process.stdout.readline()))
    wait_for_end(process)
    assert process.returncode is None and child.is_running()
    assert end_group(process) == 7
    child.wait(10)
    assert signalled == [True]
    process.stdout.close()


def test_no_group_is_signalled_after_its_leader_was_waited_for(signalled: list[bool]) -> None:
    process = leader("")
    process.communicate()
    signal_group(process, signal.SIGKILL)
    assert (end_group(process), signalled, has_ended(process)) == (0, [], True)


@pytest.mark.parametrize(
    "code", ["print(1)", "raise SystemExit(3)", "print('x' * 99999)", "while True: pass"]
)
def test_the_group_of_a_tool_is_signalled_before_its_leader_is_waited_for(
    code: str, signalled: list[bool]
) -> None:
    """asyncio would wait for its own child processes as soon as they end."""
    result = asyncio.run(Sandbox(Isolation.NONE).run_code(code, deadline_s=1.5))
    assert (result.outcome is ToolOutcome.TIMEOUT) == ("while" in code)
    assert signalled and all(signalled)


def test_the_group_of_a_tool_that_cannot_start_is_signalled_before_its_leader_is_waited_for(
    signalled: list[bool],
) -> None:
    workers = FunctionWorkers(Sandbox(Isolation.NONE), "no_such_module:f", [], 1)
    with pytest.raises(ConfigError, match="ModuleNotFoundError"):
        asyncio.run(workers.call({}, deadline_s=20))
    assert signalled and all(signalled)


def test_the_group_of_a_reward_check_is_signalled_before_its_leader_is_waited_for(
    tmp_path: Path, monkeypatch: Any, signalled: list[bool]
) -> None:
    (tmp_path / "ending_reward.py").write_text("import os\ndef reward(row, text): os._exit(5)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    problem, _ = _tried("ending_reward:reward", [("row 1", {"answer": "1"})], 60, 20)
    assert problem is not None and "code 5" in problem
    assert signalled and all(signalled)
