"""What a run says before it begins, and of a process that is gone."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

import understudy
from understudy.cluster.local import Child
from understudy.errors import UnderstudyError


@pytest.mark.parametrize(
    ("written", "told"), [("early\nthe disk is full\n", "the disk is full"), (None, "it said nothing")]
)
def test_a_lost_process_is_told_with_its_log_or_without(
    tmp_path: Path, written: str | None, told: str
) -> None:
    log = tmp_path / "rank-1.log"
    if written is not None:
        log.write_text(written)
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    process.wait()
    words = Child("rank-1", process, log, {}).exit_report("rank 1 of 2")
    assert words == f"{told} (rank 1 of 2 ended with code 3; log: {log})"


def test_inside_a_running_loop_problems_are_told_as_anywhere() -> None:
    async def notebook() -> None:
        with pytest.raises(UnderstudyError, match=r"`student\.model` is missing"):
            understudy.train({"no": "recipe"})

    asyncio.run(notebook())
