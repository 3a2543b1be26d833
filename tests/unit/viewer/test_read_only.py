"""Viewing a run on a disk that is mounted read-only, with its rows in flight."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from recorded_run import journalled, recorded_run, write_waits

_LOOK = """
import json, sys
from pathlib import Path
from understudy.cli.main import main
from understudy.observability.rundir import RunDir
from understudy.viewer.run_view import RunView

path = Path(sys.argv[1])
try:
    (path / "file").write_text("")
    sys.exit("the disk can be written to")
except OSError:
    pass
view = RunView(RunDir.open(path))
while view.look():
    pass
asked = {"ranges": {}, "text": "", "sort": "kl", "descending": True, "offset": 0, "limit": 9}
found = {kind: view.rows(labels={"kind": kind}, **asked)["rows"] for kind in ("journal", "kept", "dump", "held-out")}
tokens = len(view.row(found["journal"][0]["id"])["tokens"])
assert main(["doctor", str(path)]) == 0
print(json.dumps([view.status(), {kind: len(rows) for kind, rows in found.items()}, tokens]))
"""


def _on_read_only_disk(run: Path, shown: Path) -> list[object]:
    """What a reader sees in its own mount namespace, in which the folder of the run is mounted read-only."""
    shown.mkdir(exist_ok=True)
    mount = f"mount --bind {run} {shown} && mount -o remount,ro,bind {shown}"
    in_namespace = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    if subprocess.run([*in_namespace, mount], capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed on this machine")
    done = subprocess.run(
        [*in_namespace, f'{mount} && exec "$0" "$@"', sys.executable, "-c", _LOOK, str(shown)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout.splitlines()[-1]))


def test_a_killed_and_a_running_run_are_read_from_a_read_only_disk(tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "run")
    journalled(run)
    rows = {"journal": 5, "kept": 4, "dump": 9, "held-out": 2}
    assert _on_read_only_disk(run.path, tmp_path / "shown") == ["killed", rows, 12]
    run.state.write_text(json.dumps({"status": "running", "pid": os.getpid()}))
    write_waits(run)
    assert _on_read_only_disk(run.path, tmp_path / "shown") == ["running", rows, 12]
