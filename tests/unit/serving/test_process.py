"""The main function of our processes: exit codes, the last line of the log, the ready file, the launcher's death."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import asyncio, sys, time
from understudy.errors import LOST_PEER, ConfigError
from understudy.serving.process import process_arguments, process_main

def refuses(process): raise ConfigError("student.model is missing")
def fails(process): raise ZeroDivisionError("a fault of ours")
def fills_the_gpu(process): raise RuntimeError("CUDA error: out of memory\\nSearch for it elsewhere")
def gets_no_memory(process): raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes")
def gets_no_object(process): raise MemoryError
def loses_a_peer(process): raise SystemExit(LOST_PEER)
def works(process): process.ready(rank=3)
def waits(process): process.ready(); time.sleep(60)
def binds(process): process.bind()
async def works_on_a_loop(process): await asyncio.sleep(0); process.ready(token=process.token)

parser = process_arguments("program", None)
parser.add_argument("body")
args = parser.parse_args()
sys.exit(process_main(globals()[args.body], args, before_orphaned_exit=lambda: print("tidied", flush=True)))
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "UNDERSTUDY_TOKEN": "secret"}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        capture_output=True,
        text=True,
        env=env,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("body", "code", "last"),
    [
        ("works", 0, ""),
        ("fails", 1, "ZeroDivisionError: a fault of ours"),
        ("refuses", 2, "error: student.model is missing"),
        (
            "fills_the_gpu",
            2,
            "error: the GPU's memory is full; `nvidia-smi` lists the processes that hold it",
        ),
        (
            "gets_no_memory",
            2,
            "error: out of memory on this machine; stop other programs, or start fewer processes",
        ),
        (
            "gets_no_object",
            2,
            "error: out of memory on this machine; stop other programs, or start fewer processes",
        ),
        ("loses_a_peer", 4, ""),
    ],
)
def test_the_exit_code_and_the_last_log_line_tell_how_a_process_ended(
    body: str, code: int, last: str
) -> None:
    done = run(body)
    assert done.returncode == code, done.stderr
    assert (done.stderr.strip().splitlines() or [""])[-1] == last


def test_the_ready_file_holds_facts_and_pid_and_no_partial_file_remains(tmp_path: Path) -> None:
    for body, facts in (("works", {"rank": 3}), ("works_on_a_loop", {"token": "secret"})):
        assert run(body, "--ready-file", str(tmp_path / body)).returncode == 0
        content = json.loads((tmp_path / body).read_text())
        assert content.pop("pid") != os.getpid() and content == facts
    assert {file.name for file in tmp_path.iterdir()} == {"works", "works_on_a_loop"}


def test_a_process_binds_beyond_loopback_only_with_a_token() -> None:
    assert run("binds", "--bind", "127.0.0.1:0").returncode == 0
    refused = run("binds", "--bind", "0.0.0.0:0", "--token-env", "NOT_SET")
    assert refused.returncode == 2 and "error: --bind 0.0.0.0:0: refused without a token" in refused.stderr


def test_a_process_ends_when_its_launcher_dies(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            PROGRAM,
            "waits",
            "--ready-file",
            str(tmp_path / "r"),
            "--watch-fd",
            str(read_end),
        ],
        pass_fds=[read_end],
        stdout=subprocess.PIPE,
        text=True,
    )
    os.close(read_end)
    while not (tmp_path / "r").exists():
        assert process.poll() is None
    os.close(write_end)  # has the effect of the launcher's death
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 3 and output == "tidied\n"
