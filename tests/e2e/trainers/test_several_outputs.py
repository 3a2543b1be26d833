"""Sessions with several outputs: a bad output fails only its own row, and after a kill each is trained exactly once."""

import asyncio
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file
from small_runs import call_cli, run_cli, write_toml

import understudy
from understudy.dataplane.embedded import EmbeddedDataPlane
from understudy.dataplane.ledger import Ledger, audit
from understudy.observability.metrics import read_metrics, without_clock

Make = Callable[..., dict[str, Any]]
LOOP = "many_outputs:Outputs"
STEPS = 2
TROUBLE = {
    "1/1": "long",
    "2/0": "long",
    "3/1": "strange",
    "5/1": "raise",
    "6/0": "nan",
    "7/1": "odd",
    "11/0": "raise",
    "11/1": "long",
}
REASONS = {
    "00000-0000001_0_1": "row 00000-0000001_0_1 came with 1",
    "00000-0000002_0_0": "row 00000-0000002_0_0 came with 1",
    "00000-0000003_0_1": "row '00000-0000003_0_1': token id 60 at position",
    "00000-0000005_0_1": "reward reward raised on row 00000-0000005_0_1: ValueError: no reward for this one",
    "00000-0000006_0_0": "reward reward gave nan for row 00000-0000006_0_0",
    "00000-0000007_0_1": "row 00000-0000007_0_1 came with the metric 'by_turn' = {1: 2.0}; expected a string and a number",
    "00000-0000011_0_0": "reward reward raised on row 00000-0000011_0_0",
    "00000-0000011_0_1": "row 00000-0000011_0_1 came with 1",
}


def table_of(recipe: Make, name: str, trouble: dict[str, str] | None = None, **more: Any) -> dict[str, Any]:
    own = {
        "rollout__agent": LOOP,
        "rollout__agent_options": {LOOP: {"count": 2, "trouble": trouble or {}}},
        "data__shuffle": False,
        "data__reward": "many_outputs:reward",
        "trainer__steps": STEPS,
        "trainer__batch_size": 12,
        "trainer__checkpoint_every": 1,
        "trainer__max_dead_letters": 0.5,
    }
    return recipe(name, **{**own, **more})


def letters(run: Path) -> dict[str, str]:
    lines = (run / "dataplane" / "dead_letters.jsonl").read_text().splitlines()
    return {letter["key"]: letter["reason"] for letter in map(json.loads, lines)}


def assert_only_bad_outputs_failed(run: Path) -> None:
    found, report = letters(run), audit(run)
    assert found.keys() == REASONS.keys()
    assert all(REASONS[key] in reason for key, reason in found.items()), found
    assert report.balanced and report.in_flight == 0 and report.evicted == 0, str(report)
    assert report.trained == STEPS * 12 * 2 - len(REASONS)


def assert_each_row_trained_once(run: Path, rows: int) -> None:
    report = audit(run)
    assert report.balanced and (report.trained, report.in_flight, report.dead) == (rows, 0, 0), str(report)
    trained = [key for _, key in Ledger.read(run).trained_keys("train")]
    assert len(set(trained)) == len(trained) == rows


def bits(run: Path) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    weights = load_file(run / "checkpoints" / f"step-{STEPS:06d}" / "model.safetensors")
    lines = [without_clock(line) for line in read_metrics(run / "metrics.jsonl")]
    return lines, {name: value.tobytes() for name, value in weights.items()}


def test_each_bad_output_fails_only_its_own_row_and_the_run_repeats_to_the_bit(recipe: Make) -> None:
    first = understudy.train(table_of(recipe, "a", TROUBLE), progress=False)
    second = understudy.train(table_of(recipe, "b", TROUBLE), progress=False)
    assert_only_bad_outputs_failed(first.dir)
    assert_only_bad_outputs_failed(second.dir)
    assert bits(first.dir) == bits(second.dir)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"run__determinism": "fast"}, id="fast", marks=pytest.mark.slow),
        pytest.param({"trainer__mode": "fully_async", "run__determinism": "fast"}, id="async"),
        pytest.param(
            {"trainer__mode": "fully_async", "trainer__sync_every": 2},
            id="async-full-windows",
            marks=pytest.mark.slow,
        ),
        pytest.param({"rollout__workers": 2}, id="workers", marks=pytest.mark.slow),
    ],
)
def test_each_bad_output_fails_only_its_own_row_in_every_mode_and_with_workers(
    recipe: Make, more: dict[str, Any]
) -> None:
    run = understudy.train(table_of(recipe, "run", TROUBLE, **more), progress=False)
    assert_only_bad_outputs_failed(run.dir)


def test_an_output_that_its_worker_cannot_send_fails_only_its_own_row(recipe: Make) -> None:
    small = {"trainer__steps": 1, "trainer__batch_size": 4, "rollout__workers": 1}
    run = understudy.train(table_of(recipe, "run", {"2/1": "vast"}, **small), progress=False)
    ((key, reason),) = letters(run.dir).items()
    assert (
        key == "00000-0000002_0_1" and "its metrics or extra cannot be sent by its worker (Overflow" in reason
    )
    report = audit(run.dir)
    assert report.balanced and (report.trained, report.in_flight, report.dead) == (7, 0, 1), str(report)


def test_only_the_output_whose_reward_hangs_becomes_a_dead_letter(recipe: Make) -> None:
    short = {
        "rollout__deadline_seconds": 2.0,
        "trainer__steps": 1,
        "trainer__batch_size": 4,
        "run__determinism": "fast",
    }
    run = understudy.train(table_of(recipe, "run", {"2/0": "hang"}, **short), progress=False)
    key = "00000-0000002_0_0"
    assert letters(run.dir) == {
        key: f"reward reward timed out: {key} took longer than rollout.deadline_seconds = 2"
    }
    assert audit(run.dir).trained == 7


def run_until_killed(
    recipe: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, **more: Any
) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    table = table_of(recipe, "killed", **more)
    code, output = run_cli("train", str(write_toml(tmp_path / "r.toml", table)), "--quiet", fault=fault)
    assert code == -signal.SIGKILL, f"{fault} did not kill the run: {output}"
    return Path(table["run"]["dir"])


KILLS = [
    pytest.param("row_journal.after_put:2", {"run__determinism": "fast"}, id="fast-2"),
    *(
        pytest.param(f"row_journal.after_put:{count}", {"run__determinism": mode}, marks=pytest.mark.slow, id=f"{mode}-{count}")
        for mode in ("fast", "full")
        for count in (1, 2, 3, 4, 5)
        if (mode, count) != ("fast", 2)
    ),
    *(
        pytest.param(
            f"row_journal.after_put:{count}",
            {"run__determinism": "fast", "trainer__mode": "fully_async", "rollout__n": 2, "loss__task_coef": 1.0},
            marks=pytest.mark.slow,
            id=f"async-groups-{count}",
        )
        for count in (1, 3, 5)
    ),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "more"), KILLS)
def test_outputs_are_each_trained_once_after_a_kill_between_them_and_a_resume(
    recipe: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, more: dict[str, Any]
) -> None:
    run = run_until_killed(recipe, tmp_path, monkeypatch, fault, **more)
    code, output = call_cli("resume", str(run), "--quiet")
    assert code == 0, output
    assert_each_row_trained_once(run, STEPS * 12 * 2 * more.get("rollout__n", 1))


@pytest.mark.slow
@pytest.mark.parametrize("fault", [f"row_journal.after_put:{count}" for count in (2, 4, 7)])
def test_a_killed_run_with_bad_outputs_resumes_to_the_same_bits(
    recipe: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    whole = understudy.train(table_of(recipe, "whole", TROUBLE), progress=False)
    run = run_until_killed(recipe, tmp_path, monkeypatch, fault, trouble=TROUBLE)
    code, output = call_cli("resume", str(run), "--quiet")
    assert code == 0, output
    assert_only_bad_outputs_failed(run)
    assert bits(run) == bits(whole.dir)


def test_rows_that_only_the_teacher_refuses_fail_without_the_rest_of_their_request(
    recipe: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that does not tell its limits refuses a whole request; its rows are then asked again in halves."""
    monkeypatch.setattr("understudy.assembly.teachers.queues.check_row", lambda manifest, item: None)
    run = understudy.train(table_of(recipe, "run", TROUBLE), progress=False)
    assert_only_bad_outputs_failed(run.dir)


@pytest.mark.slow
@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("mode", ["sync", "fully_async"])
def test_groups_of_several_outputs_lose_only_the_outputs_that_fail(
    recipe: Make, mode: str, filtered: bool
) -> None:
    """Two sessions of two outputs per prompt, with advantages. With `filter_groups`, groups without signal are
    dropped."""
    run = understudy.train(
        table_of(
            recipe, "run", TROUBLE, rollout__n=2, rollout__filter_groups=filtered, loss__task_coef=1.0, trainer__mode=mode
        ),
        progress=False,
    )  # fmt: skip
    report = audit(run.dir)
    # TROUBLE is by prompt, so both sessions of a prompt have it.
    expected = {key.replace("_0_", f"_{session}_") for key in REASONS for session in (0, 1)}
    assert letters(run.dir).keys() == expected
    assert report.balanced and report.in_flight == 0
    if not filtered:
        assert report.evicted == 0 and report.trained == STEPS * 12 * 4 - len(expected)


@pytest.mark.parametrize("mode", ["sync", pytest.param("fully_async", marks=pytest.mark.slow)])
def test_a_row_that_no_producer_works_on_ends_the_run_with_an_error_that_names_it(
    recipe: Make, mode: str
) -> None:
    short = {"trainer__steps": 1, "trainer__batch_size": 4, "run__determinism": "fast"}
    run = understudy.train(table_of(recipe, "run", trainer__mode=mode, **short), progress=False).dir
    lost = "00009-0000001_0_0"

    async def leave_a_row() -> None:
        plane = EmbeddedDataPlane.open(
            run / "dataplane", max_rows=1000, max_bytes=1 << 24, spill_bytes=1 << 20
        )
        await plane.issue("train", [lost], step=2, tags={lost: {"step": 2}})
        await plane.close()

    asyncio.run(leave_a_row())
    code, output = call_cli("resume", str(run), "trainer.steps=2", "--quiet")
    assert code == 2 and lost in output and "no producer works on them" in output, output
    assert "Traceback" not in output


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 4, 5, 6, 8])
def test_no_row_is_lost_by_a_kill_while_filtered_prompts_are_replaced(
    recipe: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    more = {
        "rollout__agent": "single_turn", "rollout__agent_options": {}, "rollout__n": 2, "rollout__filter_groups": True,
        "data__reward": "small_rewards:coarse", "loss__task_coef": 1.0, "run__determinism": "fast", "rollout__max_refills": 50,
    }  # fmt: skip
    run = run_until_killed(recipe, tmp_path, monkeypatch, f"row_journal.after_put:{count}", **more)
    code, output = call_cli("resume", str(run), "--quiet")
    assert code == 0, output
    report = audit(run)
    assert report.balanced and report.in_flight == 0 and report.dead == 0, str(report)
    assert report.trained == STEPS * 12 * 2
