"""The nemesis on two real runs, and how schedules are drawn and shrunk; `make nemesis SEEDS=0:100` tries more."""

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
def test_a_run_with_injected_faults_has_no_violations(mode: str, seed: int, tmp_path: Path) -> None:
    """In the sync run all processes are killed after step 4; in the async run a replica is killed."""
    found = try_schedule(draw(seed, mode, most=2), tmp_path, fork=True)
    assert found["violations"] == []
    assert found["faults"], "no fault was injected"


def test_scored_again_reports_kept_rows_that_another_teacher_scored(tmp_path: Path) -> None:
    """The recipe that is read the second time names the other teacher's model for each row."""
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


def test_drawn_schedules_repeat_and_cover_every_mode_role_and_kind_of_fault() -> None:
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


def test_the_schedules_of_the_first_hundred_seeds_have_not_changed() -> None:
    drawn = json.dumps([draw(seed).as_dict() for seed in range(100)])
    assert hashlib.sha256(drawn.encode()).hexdigest().startswith("d583dd6d63ceb3d9")


def test_only_restricts_drawn_faults_to_the_given_kinds_and_roles() -> None:
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


def test_a_failing_schedule_shrinks_to_the_fault_that_causes_the_failure() -> None:
    bad = Fault("kill", "replica", 2, 1.5)
    schedule = Schedule("sync full", (Fault("freeze", seconds=1.0), bad, Fault("tear", after=3)))
    small = shrink(schedule, lambda one: any(fault.role == "replica" for fault in one.faults), tries=50)
    assert small.faults == (Fault("kill", "replica"),)
