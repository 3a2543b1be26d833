"""Advisories for the recorded metrics of real runs: short quickstart runs, each with one fault (`record_runs.py`)."""

import json
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from record_runs import RUNS
from test_advisories import PROBLEMS

from understudy.observability.advisories.facts import RunFacts
from understudy.observability.advisories.history import History, Series
from understudy.observability.advisories.rules import advise

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("recorded_runs.json").read_text())

EXPECTED: dict[str, set[str]] = {
    "healthy": set(),
    "healthy_async": set(),
    # Without warmup the first updates are too large. The answers never end, none is right, and the run does not recover.
    "no_warmup": {"truncation", "reward_is_constant"},
    "high_learning_rate": {"kl_above_start", "truncation", "reward_is_constant"},
    "few_new_tokens": {"truncation", "teacher_solves_nothing"},
    "no_marked_number": {"no_parsable_result", "reward_is_constant", "teacher_solves_nothing"},
    "solved_prompts": {"reward_is_constant"},
    "filtered_prompts": {"groups_without_signal"},
    # The teachers get the same reward, for which they were not trained.
    "paid_for_length": {"kl_above_start", "truncation", "teacher_below_student"},
    "paid_for_some_length": {"kl_above_start", "teacher_below_student"},
    "paid_for_more_length": {"length_inflation", "teacher_below_student"},
    "paid_for_one_letter": {
        "kl_above_start",
        "entropy_collapse",
        "overlap_falls",
        "truncation",
        "teacher_below_student",
        "teacher_solves_nothing",
    },
    # The live teacher sees the answers in its prompt. Student and teacher come to agree on outputs that ignore them.
    "live_self": {"agreed_on_nothing", "truncation", "reward_is_constant"},
    "small_clamp": {"clamped_or_clipped"},
    "many_epochs": {"kl_above_start", "teacher_below_student"},
    "narrow_clip": {"clamped_or_clipped", "teacher_below_student"},
    "hot_engine": {"engine_disagrees", "truncation", "reward_is_constant"},
    "swapped_teachers": {"teacher_solves_nothing", "reward_is_constant"},
    "weak_teacher": {"teacher_below_student"},
    "slowed_teacher": {"slow_teacher"},
    "answers_of_others": {"kl_rises_while_loss_falls", "teacher_solves_nothing"},
    "killed_replica": {"restarting_replica"},
    "slow_reward": {"trainer_idle"},
    "slow_trainer": {"teacher_idle"},
    "slow_disk": {"checkpoints_slow"},
    "small_disk": {"disk_low"},
    "failing_reward": {"dead_letters"},
    # The teacher's prompt asks for short answers. In the end the student writes a single full stop.
    "live_brief": {"answers_vanish"},
}


def facts(name: str) -> RunFacts:
    record = RECORDED[name]
    history = History()
    for key, ((first, last), values) in record["metrics"].items():
        steps = np.linspace(first, last, len(values)).round().astype(int)
        history.series[key] = Series(array("q", steps.tolist()), array("d", values))
    tables: dict[str, Any] = {}
    for key, value in record["recipe"].items():
        section, _, rest = key.partition(".")
        tables.setdefault(section, {})[rest] = value
    sizes = (record.get("free_bytes"), record.get("checkpoint_bytes", 0))
    return RunFacts(history, tables, record["dead_letters"], *sizes)


@pytest.mark.parametrize("name", EXPECTED)
def test_each_recorded_run_gets_exactly_its_expected_advisories(name: str) -> None:
    assert {one.name for one in advise(facts(name))} == EXPECTED[name]


def test_every_run_of_record_runs_has_recorded_metrics_and_expected_advisories() -> None:
    assert EXPECTED.keys() == RUNS.keys() == RECORDED.keys()


def test_every_advisory_has_a_recorded_run() -> None:
    reported = {name for names in EXPECTED.values() for name in names}
    assert reported == PROBLEMS.keys()
    keys = {key for name in EXPECTED for one in advise(facts(name)) for key in one.metrics}
    assert {"actor/distillation/clamped_share", "actor/pg_clipfrac"} <= keys


def test_a_healthy_run_has_free_space_recorded() -> None:
    assert all(facts(name).free_bytes for name in ("healthy", "healthy_async"))


def test_the_disk_low_evidence_shows_sizes_in_mib() -> None:
    (found,) = advise(facts("small_disk"))
    assert found.evidence == "193.5 MiB free, a checkpoint takes 4.2 MiB"


def test_kl_rises_while_loss_falls_is_reported_once_for_a_run_with_one_teacher() -> None:
    away = [one for one in advise(facts("answers_of_others")) if one.name == "kl_rises_while_loss_falls"]
    assert len(away) == 1 and "KL 3.45 → 5.2" in away[0].evidence
