"""Each advisory is reported for metrics that show its problem, with evidence and a recipe key, and none for a healthy run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from understudy.observability.advisories import rules
from understudy.observability.advisories.facts import RunFacts
from understudy.observability.advisories.gather import advisories_of, reasons
from understudy.observability.advisories.history import History
from understudy.observability.advisories.rules import advise
from understudy.observability.rundir import RunDir

Line = dict[str, Any]
STEPS = 40


def healthy(step: int) -> Line:
    """A run as the quickstart records it: loss, KL and entropy fall together, accuracy rises."""
    left = 1.0 - step / (STEPS + 1)
    line = {
        "actor/loss": 1.5 * left, "actor/distillation/loss": 1.5 * left, "teacher/add/kl": 1.4 * left,
        "teacher/sort/kl": 1.6 * left, "actor/entropy": 1.6 * left**3, "actor/distillation/student_mass": 0.7 + 0.2 * (1 - left), "actor/engine_diff": 0.001,
        "actor/distillation/clamped_share": 0.0, "actor/pg_clipfrac": 0.02, "rollout_corr/abs_diff_mean": 0.001,
        "response_length/mean": 5.0, "response_length/clip_ratio": 0.03, "critic/score/mean": 1 - left,
        "rollout/reward/math/parsed": 0.98, "rollout/filtered_prompts": 3.0, "rollout/rows": 128.0,
        "perf/teacher/add/latency_mean": 0.2, "perf/teacher/sort/latency_mean": 0.3, "perf/teacher/add/0/restarts": 0.0,
        "perf/async/trainer_idle": 0.1, "perf/async/teacher_idle": 0.5, "rows/dead_letters": 0.0, "async/staleness/mean": 0.0,
    }  # fmt: skip
    return line | ({"val/accuracy/add": 1 - left, "val/teacher_accuracy/add": 1.0} if step % 10 == 0 else {})


def facts(change: Callable[[int], Line] = lambda step: {}, **given: Any) -> RunFacts:
    recipe = {"trainer": {"batch_size": 128}, "rollout": {"max_new_tokens": 8}, "loss": {"task_coef": 0.0}}
    lines = [{"step": step, **healthy(step), **change(step)} for step in range(1, STEPS + 1)]
    return RunFacts(History(lines), given.pop("recipe", recipe), **given)


def test_a_healthy_run_gets_no_advisory() -> None:
    assert advise(facts(free_bytes=100 << 30, checkpoint_bytes=1 << 30)) == []


def test_a_run_of_a_few_steps_gets_no_advisory() -> None:
    lines = [{"step": 1, "actor/loss": 1.0, "response_length/clip_ratio": 1.0, "critic/score/mean": 0.0}]
    assert advise(RunFacts(History(lines))) == [] == advise(RunFacts(History()))


def rising(step: int) -> float:
    return 1.0 + step / STEPS


PROBLEMS: dict[str, RunFacts] = {
    "kl_rises_while_loss_falls": facts(lambda step: {"teacher/sort/kl": rising(step)}),
    "truncation": facts(lambda step: {"response_length/clip_ratio": 0.4}),
    "length_inflation": facts(
        lambda step: {"response_length/mean": 5.0 * rising(step) ** 2, "response_length/clip_ratio": 0.1}
    ),
    "entropy_collapse": facts(
        lambda step: {"actor/distillation/loss": 1.5, "actor/loss": 1.5, "teacher/add/kl": 1.5}
    ),
    "agreed_on_nothing": facts(
        lambda step: {
            "rollout/teacher_version/max": float(step),
            "critic/score/mean": 0.1 / step,
            **dict.fromkeys(("actor/loss", "actor/distillation/loss"), 1.5 / step**2),
        }
    ),
    "answers_vanish": facts(
        lambda step: {"rollout/teacher_version/max": float(step), "response_length/mean": 32.0 / step}
    ),
    "overlap_falls": facts(lambda step: {"actor/distillation/student_mass": 0.9 - 0.4 * step / STEPS}),
    "kl_above_start": facts(
        lambda step: {
            "actor/distillation/loss": min(1.5 * step, 3.0),
            "actor/loss": 3.0,
            "actor/entropy": 1.6,
        }
    ),
    "teacher_solves_nothing": facts(
        lambda step: {"val/teacher_accuracy/sort": 0.0, "val/accuracy/sort": 0.0}
    ),
    "teacher_below_student": facts(
        lambda step: {"val/teacher_accuracy/openai/gsm8k": 0.5, "val/accuracy/openai/gsm8k": 0.6}
    ),
    "reward_is_constant": facts(lambda step: {"critic/score/mean": 0.0}),
    "no_parsable_result": facts(lambda step: {"rollout/reward/math/parsed": 0.2}),
    "groups_without_signal": facts(lambda step: {"rollout/filtered_prompts": 300.0}),
    "clamped_or_clipped": facts(lambda step: {"actor/distillation/clamped_share": 0.2}),
    "engine_disagrees": facts(lambda step: {"rollout_corr/abs_diff_mean": 0.2}),
    "slow_teacher": facts(lambda step: {"perf/teacher/sort/latency_mean": 1.0}),
    "trainer_idle": facts(lambda step: {"perf/async/trainer_idle": 0.6}),
    "teacher_idle": facts(lambda step: {"perf/async/teacher_idle": 0.99}),
    "restarting_replica": facts(lambda step: {"perf/teacher/add/0/restarts": float(step > 20)}),
    "dead_letters": facts(dead_letters={"DataError": 70, "deadline": 3}),
    "checkpoints_slow": facts(
        lambda step: {"time/step": 1.0} | ({"time/checkpoint": 2.0} if step % 4 == 1 and step > 1 else {})
    ),
    "disk_low": facts(free_bytes=2 << 30, checkpoint_bytes=1 << 30),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_each_problem_triggers_only_its_advisory_with_evidence_and_a_suggestion(name: str) -> None:
    found = advise(PROBLEMS[name])
    assert [one.name for one in found] == [name]
    assert any(digit in found[0].evidence for digit in "0123456789") and found[0].turn.endswith(".")
    assert all(key in PROBLEMS[name].history.series for key in found[0].metrics)


def test_every_rule_has_a_problem_case() -> None:
    reported = {one.name for case in PROBLEMS.values() for one in advise(case)}
    assert reported == PROBLEMS.keys()
    assert all(any(list(rule(case)) for case in PROBLEMS.values()) for rule in rules.RULES)


def test_a_constant_reward_of_one_is_reported_only_when_the_loss_uses_the_reward() -> None:
    constant = {"critic/score/mean": 1.0}
    assert advise(facts(lambda step: constant)) == []
    with_task_loss = advise(facts(lambda step: constant, recipe={"loss": {"task_coef": 1.0}}))
    assert [one.level for one in with_task_loss] == ["warning"] and "filter_groups" in with_task_loss[0].turn


def test_nothing_is_reported_when_a_live_teacher_follows_a_student_that_learns() -> None:
    assert advise(facts(lambda step: {"rollout/teacher_version/max": float(step)})) == []


@pytest.mark.parametrize(
    ("reward", "reported"),
    [
        (lambda step: 0.0, False),
        (lambda step: -1.0 / step, False),
        (lambda step: -1.0, False),
        (lambda step: -1.0 - step / 10, True),
        (lambda step: float(step == 5), True),
        (lambda step: 0.4 if step == 1 else 0.3, False),
    ],
)
def test_agreement_with_a_live_teacher_is_reported_only_when_the_reward_falls(
    reward: Callable[[int], float], reported: bool
) -> None:
    agreeing_run = facts(
        lambda step: {
            "rollout/teacher_version/max": float(step),
            "critic/score/mean": reward(step),
            "actor/distillation/loss": 1.5 / step**2,
        }
    )
    assert ("agreed_on_nothing" in {one.name for one in advise(agreeing_run)}) == reported


def test_the_no_parsable_result_advisory_counts_the_answers_without_a_result() -> None:
    (found,) = advise(facts(lambda step: {"rollout/reward/math/parsed": 0.25}))
    assert "75%" in found.sentence and "960 of 1280 answers" in found.evidence


def test_a_logprob_difference_is_not_reported_when_the_rows_are_stale() -> None:
    stale = {"rollout_corr/abs_diff_mean": 0.2, "async/staleness/mean": 0.9}
    assert advise(facts(lambda step: stale)) == []


@pytest.mark.parametrize(
    ("recipe", "reported"),
    [
        ({}, ["engine_disagrees"]),
        ({"rollout": {"temperature": 0.7}}, []),
        ({"rollout": {"temperature": 0.7}, "loss": {"student_temperature": 0.7}}, ["engine_disagrees"]),
        ({"rollout": {"top_p": 0.9}}, []),
    ],
)
def test_engine_diff_is_reported_only_when_sampling_and_loss_use_the_same_distribution(
    recipe: dict[str, Any], reported: list[str]
) -> None:
    lines = [{"step": step, "actor/engine_diff": 0.2} for step in range(1, 21)]
    assert [one.name for one in advise(RunFacts(History(lines), recipe))] == reported
    lines = [line | {"actor/updates": 2.0} for line in lines]
    assert advise(RunFacts(History(lines), recipe)) == [], "later updates of a step move the student"


def test_overlap_falls_reads_the_teacher_mass_when_the_student_names_the_candidates() -> None:
    (found,) = advise(facts(lambda step: {"actor/distillation/teacher_mass": 0.9 - 0.4 * step / STEPS}))
    assert found.name == "overlap_falls" and "of the teacher on the student's candidates" in found.evidence


def test_kl_above_start_suggests_learning_rate_without_a_task_loss_and_distill_coef_with_one() -> None:
    away = {"actor/distillation/loss": 3.0, "actor/loss": 3.0}

    def turn(task: float) -> str:
        case = facts(lambda step: away if step > 1 else {}, recipe={"loss": {"task_coef": task}})
        return next(one.turn for one in advise(case) if one.name == "kl_above_start")

    assert "learning_rate" in turn(0.0) and "distill_coef" in turn(1.0)


def test_warnings_are_listed_before_notes_and_a_few_dead_letters_are_a_note() -> None:
    found = advise(facts(lambda step: {"perf/async/trainer_idle": 0.6, "response_length/clip_ratio": 0.4}))
    assert [one.level for one in found] == ["warning", "note"]
    assert [one.level for one in advise(facts(dead_letters={"DataError": 1}))] == ["note"]


def test_dead_letter_reasons_are_grouped_without_row_keys_and_details() -> None:
    letters = [{"reason": f"its group lost p{n}_0_0: DataError: x"} for n in range(3)] + [
        {"reason": "deadline"}
    ]
    assert reasons(letters) == {"its group lost pN_N_N": 3, "deadline": 1}


def test_advisories_are_read_from_a_run_directory_whose_files_end_in_a_torn_line(tmp_path: Path) -> None:
    run = RunDir.create(str(tmp_path / "run"), "run")
    lines = [{"step": step, **healthy(step), "response_length/clip_ratio": 0.5} for step in range(1, 21)]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"torn')
    run.recipe.write_text('{"rollout": {"max_new_tokens": 8}}')
    run.dataplane.mkdir()
    run.dead_letters.write_text('{"key": "a", "reason": "DataError: bad"}\n{"torn')
    found = advisories_of(run, live=True)
    assert {"truncation", "dead_letters"} <= {one.name for one in found}
    assert "rollout.max_new_tokens = 8" in found[0].sentence
