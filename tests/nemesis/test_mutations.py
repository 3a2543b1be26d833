"""Bugs planted in a copy of the package: the nemesis finds each within `SEEDS` seeds. Those of pure parts are in `simulation/`."""

from __future__ import annotations

from pathlib import Path

import pytest
from planted import one, seeds_until_found

SEEDS = 8
CAMPAIGN = Path(__file__).with_name("campaign.py")
BUGS = {
    "a rewind leaves rows marked as trained": one(
        "sync full", "dataplane/journal/rewind.py", 'connection.execute(_UNTRAIN, {"step": step})', "pass",
    ),
    "a rewind leaves the events of forgotten rows": one(
        "sync full", "dataplane/journal/rewind.py", "connection.execute(_FORGET_EVENTS)", "pass",
    ),
    "a resume keeps metrics of steps that it makes again": one(
        "sync full", "trainers/checkpoints.py", "cut_back(run.metrics, step)", "pass",
    ),
    "a resume begins the data again": one(
        "sync full", "trainers/checkpoints.py",
        'system.producer.cursor.restore(checkpoint.extra["cursor"])', "pass",
    ),
    "a resume begins with an empty optimizer": one(
        "sync full", "policy/policy.py", "self.optimizer.load_state(optimizer)", "pass",
    ),
    "seeds of samples depend on the process": one(
        "sync full", "trainers/produce/session.py", "derive_seed(producer.settings.seed,",
        "derive_seed(producer.settings.seed + __import__('os').getpid(),",
    ),
    "dead letters are in the journal alone": one(
        "several outputs", "dataplane/dead_letters.py",
        "out.write(self._line(partition, key, step, told))", "pass",
    ),
    "processes outlive their trainer": one(
        "engine process", "serving/process.py", "end_with_launcher(args.watch_fd, before_orphaned_exit)", "pass",
    ),
}  # fmt: skip


@pytest.mark.faults
@pytest.mark.parametrize("name", BUGS)
def test_the_nemesis_finds_a_planted_bug(name: str, tmp_path: Path) -> None:
    bug, out = BUGS[name], str(tmp_path / "out.jsonl")
    words = [
        str(CAMPAIGN),
        "--mode",
        bug.finder,
        "--seeds",
        f"0:{SEEDS}",
        "--out",
        out,
        "--first",
        "--shrink",
        "0",
    ]
    seeds = seeds_until_found(words, bug, tmp_path)
    assert 1 <= seeds <= SEEDS
    print(f"{name}: {seeds} seeds")
