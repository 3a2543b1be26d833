"""The error message of a command that runs out of memory or threads."""

import argparse

import pytest

from understudy.cli import main as cli


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("can't start new thread"),
        RuntimeError(
            "unable to mmap 1461472 bytes from file <model.safetensors>: Cannot allocate memory (12)"
        ),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:113] data. DefaultCPUAllocator: not enough memory: you tried to allocate 1536 bytes."
        ),
    ],
)
def test_a_command_that_runs_out_of_memory_or_threads_exits_with_2_and_says_so(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails(_: object) -> None:
        raise error

    monkeypatch.setattr(cli, "_parsed", lambda *_: argparse.Namespace(run_command=fails, debug=False))
    assert cli.main(["train"]) == 2
    assert "out of memory on this machine; stop other programs" in capfd.readouterr().err
