"""The program while it is interrupted early, and on a terminal that goes away."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from understudy.cli.terminal import ClosableTerminal


def test_an_early_interrupt_ends_it_with_one_word(tmp_path: Path) -> None:
    """Sent while modules are imported; Python itself says which."""
    command = [sys.executable, "-X", "importtime", "-m", "understudy.cli.main", "check", "none.toml"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if "pydantic" in line:
            process.send_signal(signal.SIGINT)
            break
    said = [line.strip() for line in process.stderr if not line.startswith("import time:")]
    assert process.wait(timeout=60) == 130 and said == ["interrupted"]


def test_a_closed_terminal_takes_what_it_is_given() -> None:
    terminal, end = pty.openpty()
    raw = os.fdopen(end, "w", buffering=1)
    stream = ClosableTerminal(raw)
    stream.write("seen\n")
    assert os.read(terminal, 100) == b"seen\r\n" and stream.isatty()
    os.close(terminal)
    for _ in range(3):
        assert stream.write("lost\n") == 5
        stream.flush()
    raw.close()


def test_other_troubles_are_told(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    raw = os.fdopen(writer, "w", buffering=1)
    with pytest.raises(BrokenPipeError):
        ClosableTerminal(raw).write("x\n")
    with pytest.raises(BrokenPipeError):
        raw.close()
