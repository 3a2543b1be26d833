"""Two schedules against real runs; `make nemesis SEEDS=0:100` tries more."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from campaign import try_schedule
from driver import Trial
from modes import MODES
from reading import read_kept, scored_again
from schedules import BEYOND_DEADLINES, KINDS, MEMORY, NETWORK, Fault, Schedule, draw, shrink
from starting import trainer_server


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("mode", "seed"), [("sync full", 14), ("async 1", 1)])
def test_a_disturbed_run_keeps_every_promise(mode: str, seed: int, tmp_path: Path) -> None:
    """All processes killed after step 4; a replica killed under a fully async run."""
    found = try_schedule(draw(seed, mode, most=2), tmp_path, fork=True)
    assert found["violations"] == []
    assert found["faults"], "no fault was injected"


def test_kept_rows_scored_by_another_teacher_are_found(tmp_path: Path) -> None:
    """The recipe of the second reading names the other teacher's model for each."""
    trial = Trial(Schedule("sync fast", ()), tmp_path / "trial", trainer_server())
    kept = trial.carry_out().kept
    assert len(kept) > 20 and max(row["apart"] for row in kept) < 1e-4
    table = (tmp_path / "trial" / "recipe.toml").read_text()
    swapped = (
        table.replace("teacher-add", "?").replace("teacher-sort", "teacher-add").replace("?", "teacher-sort")
    )
    (tmp_path / "swapped.toml").write_text(swapped)
    again = scored_again(trial.run, read_kept(trial.run), tmp_path / "swapped.toml")
    assert min(row["apart"] for row in again) > 0.1


def test_schedules_repeat_and_reach_every_mode_and_role() -> None:
    drawn = [draw(seed) for seed in range(400)]
    assert drawn == [draw(seed) for seed in range(400)]
    assert {one.mode for one in drawn} == {name for name, mode in MODES.items() if mode.by_seed}
    reached = {(one.mode, fault.role) for one in drawn for fault in one.faults}
    assert reached >= {(name, role) for name, mode in MODES.items() if mode.by_seed for role in mode.roles}
    assert all(Schedule.from_dict(one.as_dict()) == one for one in drawn)
    kinds = {fault.kind for one in drawn for fault in one.faults}
    assert kinds == {*KINDS, *NETWORK}
    frozen = [fault for one in drawn for fault in one.faults if fault.kind == "freeze"]
    assert {fault.role for fault in frozen if fault.seconds == BEYOND_DEADLINES} >= {"trainer", "replica"}


def test_seeds_draw_what_they_drew_before_there_were_more_kinds_to_ask_for() -> None:
    drawn = json.dumps([draw(seed).as_dict() for seed in range(100)])
    assert hashlib.sha256(drawn.encode()).hexdigest().startswith("d583dd6d63ceb3d9")


def test_faults_of_some_kinds_alone_are_drawn() -> None:
    def drawn(*only: str) -> set[str]:
        found = [fault for seed in range(40) for fault in draw(seed, "epochs", only=only).faults]
        return {f"{fault.kind} {fault.role}" for fault in found}

    assert drawn("kill replica", "clock") == {"kill replica", "clock trainer"}
    assert drawn(MEMORY) == {"no memory trainer", "no memory replica", "no memory fork server"}
    assert drawn("no memory trainer") == {"no memory trainer"}
    starting = [
        fault for seed in range(40) for fault in draw(seed, "epochs", only=["kill fork server"]).faults
    ]
    assert {fault.after for fault in starting} == {0}


def test_a_failing_schedule_shrinks_to_the_fault_that_matters() -> None:
    bad = Fault("kill", "replica", 2, 1.5)
    schedule = Schedule("sync full", (Fault("freeze", seconds=1.0), bad, Fault("tear", after=3)))
    small = shrink(schedule, lambda one: any(fault.role == "replica" for fault in one.faults), tries=50)
    assert small.faults == (Fault("kill", "replica"),)
