"""Interrupts during imports, and output to a terminal or a disk that no longer takes it."""

import os
import pty
import resource
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from understudy.cli.terminal import ClosableTerminal

IMPORTING = """
import sys, time, types
module, how = sys.argv[1:3]
async def evaluate_model(*given, **settings):
    print("started", flush=True)
    return {}
# In place of the module that imports torch, which takes many seconds on a loaded machine.
run = types.ModuleType("understudy.run.evaluate_model")
run.evaluate_model = evaluate_model
class Swallows:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            print("importing", flush=True)
            try:
                for _ in range(600):  # a signal just before a sleep does not cut it short
                    time.sleep(0.1)
            except:
                if how == "passes on":
                    raise
                if how == "raises":
                    raise ImportError("an extension module could not be loaded") from None
            if name == run.__name__:
                from importlib.machinery import ModuleSpec
                return ModuleSpec(name, self)
    def create_module(self, spec):
        return run
    def exec_module(self, module):
        pass
sys.meta_path.insert(0, Swallows())
from understudy.cli.main import program
del sys.argv[1:3]
sys.exit(program())
"""


@pytest.mark.parametrize(
    ("module", "how"),
    [
        ("understudy.cli.commands.evaluate", "passes on"),
        ("understudy.cli.commands.evaluate", "swallows"),
        ("understudy.run.evaluate_model", "swallows"),
        ("understudy.run.evaluate_model", "raises"),
    ],
)
def test_ctrl_c_during_an_import_ends_the_program_with_code_130_and_without_a_traceback(
    module: str, how: str
) -> None:
    """Ctrl-C is sent once, on a real terminal. The module being imported may discard the interrupt or raise another
    error instead."""
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell starts background jobs with SIGINT ignored
        command = ["eval", str(Path(__file__).parent), "--data", "rows.jsonl", "--reward", "module:function"]
        os.execv(sys.executable, [sys.executable, "-c", IMPORTING, module, how, *command])
    output = b""
    while b"importing" not in output:
        output += os.read(terminal, 1 << 16)
    os.write(terminal, b"\x03")
    with suppress(OSError):  # EIO: the program has ended
        while more := os.read(terminal, 1 << 16):
            output += more
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    assert b"started" not in output and b"Traceback" not in output and output.endswith(b"interrupted\r\n"), (
        output
    )


def test_writes_to_a_closed_terminal_are_discarded_without_an_error() -> None:
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


def test_a_full_disk_under_stderr_does_not_change_the_exit_code(tmp_path: Path) -> None:
    """As in `understudy train recipe.toml 2> FILE` on a full disk. Once there is room again, later messages are
    written."""
    command = [sys.executable, "-m", "understudy.cli.main", "check", str(tmp_path / "missing.toml")]
    with Path("/dev/full").open("w") as full:
        assert subprocess.run(command, stderr=full, timeout=60).returncode == 2
    log = tmp_path / "stderr.log"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with log.open("w", buffering=1) as raw:
        stream = ClosableTerminal(raw, needs_room=False)
        stream.write("first\n")
        resource.setrlimit(resource.RLIMIT_FSIZE, (6, hard))
        try:
            assert stream.write("second\n") == 7
            stream.flush()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        stream.write("third\n")
    assert log.read_text() == "first\nsecond\nthird\n"


def test_other_write_errors_such_as_a_broken_pipe_are_raised(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    raw = os.fdopen(writer, "w", buffering=1)
    with pytest.raises(BrokenPipeError):
        ClosableTerminal(raw).write("x\n")
    with pytest.raises(BrokenPipeError):
        raw.close()
