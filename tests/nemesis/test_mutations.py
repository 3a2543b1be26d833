"""Bugs planted in a copy of the package: the nemesis finds each within `SEEDS` seeds.

A mutation names the text it replaces; when the code moves on, the test fails and is rewritten with it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import understudy

SEEDS = 8
CAMPAIGN = Path(__file__).with_name("campaign.py")
BUGS = {
    "a rewind leaves rows marked as trained": (
        "sync full", "dataplane/journal/rewind.py", 'connection.execute(_UNTRAIN, {"step": step})', "pass",
    ),
    "a rewind leaves the events of forgotten rows": (
        "sync full", "dataplane/journal/rewind.py", "connection.execute(_FORGET_EVENTS)", "pass",
    ),
    "a resume keeps metrics of steps that it makes again": (
        "sync full", "trainers/checkpoints.py", "cut_back(run.metrics, step)", "pass",
    ),
    "a resume begins the data again": (
        "sync full", "trainers/checkpoints.py",
        'system.producer.cursor.restore(checkpoint.extra["cursor"])', "pass",
    ),
    "a resume begins with an empty optimizer": (
        "sync full", "policy/policy.py", "self.optimizer.load_state(optimizer)", "pass",
    ),
    "seeds of samples depend on the process": (
        "sync full", "trainers/produce/session.py", "derive_seed(producer.settings.seed,",
        "derive_seed(producer.settings.seed + __import__('os').getpid(),",
    ),
    "dead letters are in the journal alone": (
        "several outputs", "dataplane/dead_letters.py",
        "out.write(self._line(partition, key, step, told))", "pass",
    ),
    "processes outlive their trainer": (
        "engine process", "serving/process.py", "end_with_launcher(args.watch_fd, before_orphaned_exit)", "pass",
    ),
}  # fmt: skip


@pytest.mark.faults
@pytest.mark.parametrize("bug", BUGS)
def test_the_nemesis_finds_a_planted_bug(bug: str, tmp_path: Path) -> None:
    mode, file, old, new = BUGS[bug]
    package = tmp_path / "src" / "understudy"
    shutil.copytree(Path(understudy.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    source = package / file
    text = source.read_text()
    assert text.count(old) == 1, f"{file} no longer holds what '{bug}' replaces"
    source.write_text(text.replace(old, new))
    words = [
        "--mode",
        mode,
        "--seeds",
        f"0:{SEEDS}",
        "--out",
        str(tmp_path / "out.jsonl"),
        "--first",
        "--shrink",
        "0",
    ]
    done = subprocess.run(
        [sys.executable, str(CAMPAIGN), *words],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "src")}, capture_output=True, text=True,
    )  # fmt: skip
    print(done.stdout[-3000:])
    assert done.returncode == 1 and "violation:" in done.stdout, done.stdout[-3000:] + done.stderr[-2000:]
