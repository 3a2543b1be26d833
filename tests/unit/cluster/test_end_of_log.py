"""What is reported of a process that ended: the end of its log, its exit code, the stack of a crash."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import understudy
from understudy.cluster.local import Child, LocalProcesses
from understudy.errors import UnderstudyError


@pytest.mark.parametrize(
    ("written", "last_line"),
    [("early\nthe disk is full\n", "the disk is full"), (None, "it printed nothing")],
)
def test_the_exit_report_has_the_last_line_of_the_log_or_says_that_nothing_was_printed(
    tmp_path: Path, written: str | None, last_line: str
) -> None:
    log = tmp_path / "rank-1.log"
    if written is not None:
        log.write_text(written)
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    process.wait()
    report = Child("rank-1", process, log, {}).exit_report("rank 1 of 2")
    assert report == f"{last_line} (rank 1 of 2 ended with code 3; log: {log})"


CRASHING = """
import ctypes, logging, sys, threading
from understudy.serving.process import process_arguments, process_main

def body(process):
    logging.info("a line of its own")
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    ctypes.string_at(0)

sys.exit(process_main(body, process_arguments("crashing", None, serves=False).parse_args()))
"""


def test_a_crash_in_native_code_leaves_its_stack_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "rank-1.log"
    with log.open("wb") as sink:
        process = subprocess.Popen([sys.executable, "-c", CRASHING], stdout=sink, stderr=sink)
    process.wait()
    assert process.returncode == -signal.SIGSEGV
    report = Child("rank-1", process, log, {}).exit_report("rank 1 of 2")
    assert (
        report
        == f"rank 1 of 2 was killed by SIGSEGV (a crash in native code; the log has its stack); log: {log}"
    )
    processes = LocalProcesses(tmp_path)
    lines = processes.end_of_log("rank-1").splitlines()
    with log.open("a") as sink:
        sink.write("error: of its next start\n")
    assert processes.end_of_log("rank-1").endswith("error: of its next start")
    asyncio.run(processes.close())
    assert lines[0] == "Fatal Python error: Segmentation fault" and any("in body" in line for line in lines)


def test_train_inside_a_running_event_loop_raises_the_usual_error_for_a_bad_recipe() -> None:
    async def notebook() -> None:
        with pytest.raises(UnderstudyError, match=r"`student\.model` is missing"):
            understudy.train({"no": "recipe"})

    asyncio.run(notebook())
