"""How the soak draws faults and computes its figures; the soak itself takes hours (`make soak`)."""

from __future__ import annotations

import random
from pathlib import Path

from soak import ENDS_A_LAUNCH, Soak, accuracies, last_step


def test_draw_gives_no_fault_that_ends_the_trainer_when_it_may_not_end(tmp_path: Path) -> None:
    soak = Soak(tmp_path / "soak", tmp_path / "soak.json", 15.0, random.Random(0), until=0.0)
    not_ending = [soak.draw(may_end=False) for _ in range(300)]
    assert not [one for one in not_ending if one.role == "trainer" and one.kind in ENDS_A_LAUNCH]
    assert {one.role for one in not_ending} == {"trainer", "replica"}
    ending = {one.kind for one in (soak.draw(may_end=True) for _ in range(300)) if one.role == "trainer"}
    assert ending & ENDS_A_LAUNCH and "point" not in ending


def test_the_last_accuracy_is_compared_with_the_teacher_s() -> None:
    lines = [
        {"step": 0, "val/accuracy/add": 0.1, "val/teacher_accuracy/add": 1.0},
        {"step": 9, "val/accuracy/add": 0.97},
    ]
    (row,) = accuracies(lines)
    assert (row["value"], row["peer_value"], row["ratio"], row["met"]) == (0.97, 1.0, 0.97, False)


def test_last_step_ignores_an_incomplete_last_line(tmp_path: Path) -> None:
    assert last_step(tmp_path) == 0
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "actor/lo')
    assert last_step(tmp_path) == 2
