"""A run on a disk that is mounted read-only: rows in flight included, live and killed."""

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
    """What a reader in a mount namespace of its own sees, where the run's folder is mounted read-only."""
    shown.mkdir(exist_ok=True)
    mount = f"mount --bind {run} {shown} && mount -o remount,ro,bind {shown}"
    apart = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    if subprocess.run([*apart, mount], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets no user mount")
    done = subprocess.run(
        [*apart, f'{mount} && exec "$0" "$@"', sys.executable, "-c", _LOOK, str(shown)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout.splitlines()[-1]))


def test_a_run_is_read_from_a_read_only_disk(tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "run")
    journalled(run)
    rows = {"journal": 5, "kept": 4, "dump": 9, "held-out": 2}
    assert _on_read_only_disk(run.path, tmp_path / "shown") == ["killed", rows, 12]
    run.state.write_text(json.dumps({"status": "running", "pid": os.getpid()}))
    write_waits(run)
    assert _on_read_only_disk(run.path, tmp_path / "shown") == ["running", rows, 12]
