"""Teachers with a prompt of their own, in whole runs: scores, losses, mixtures, schedules, kills, dead letters."""

import json
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from small_runs import ASSETS, call_cli, run_cli, write_toml
from transformers import AutoModelForCausalLM

import understudy
from understudy.dataplane.kept_rows import read_columns
from understudy.dataplane.ledger import audit
from understudy.errors import ConfigError, UnderstudyError
from understudy.observability.metrics import without_clock
from understudy.types.scores import ScoreItem

Make = Callable[..., dict[str, Any]]
ROWS = [json.loads(line) for line in (ASSETS / "data" / "train.jsonl").read_text().splitlines()][:64]
TEACHER_PROMPTS = {"add": "{{ answer }}{{ prompt }}", "sort": "{{ prompt }}{{ answer }}{{ answer }}"}
VOCABULARY = json.loads((ASSETS / "models" / "student" / "config.json").read_text())["vocab_size"]
SMALL: dict[str, Any] = {
    "trainer__steps": 2,
    "trainer__batch_size": 8,
    "run__keep_rows": 1 << 22,
    "data__train": ROWS,
}


def recipe_with(recipe: Make, name: str, **more: Any) -> dict[str, Any]:
    """A small run whose two teachers read prompts with the answer."""
    prompts = {f"teachers__{teacher}__prompt": prompt for teacher, prompt in TEACHER_PROMPTS.items()}
    return recipe(name, **{**prompts, **SMALL, **more})


def kept_rows_of(run: Path, step: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    lines = [json.loads(line) for line in (run / "kept_rows" / f"{step:06d}.jsonl").open(encoding="utf-8")]
    return [(line, read_columns(run / "kept_rows", step, line)) for line in lines]


@cache
def plain_model(name: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(ASSETS / "models" / name, dtype=torch.float64).eval()


def plain_logprobs(model: str, tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """float64 [P, V]: a plain forward pass, and the softmax before each position."""
    with torch.no_grad():
        logits = plain_model(model)(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0]
    return torch.log_softmax(logits, -1).numpy()[positions - 1]


def bits(run: Path) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    weights = load_file(run / "checkpoints" / "step-000002" / "model.safetensors")
    lines = [without_clock(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        for name in [name for name in line if name.startswith("async/")]:
            del line[name]
    return lines, {name: value.tobytes() for name, value in weights.items()}


def test_scores_and_loss_equal_a_plain_forward_after_the_teachers_own_prompt(recipe: Make) -> None:
    """The first step's loss is recomputed over the whole vocabulary, with the student after its prompt and the teacher
    after the teacher's prompt. Positions off by one would differ by nats."""
    run = understudy.train(
        recipe_with(recipe, "run", loss__topk=VOCABULARY, trainer__batch_size=4, data__shuffle=False),
        progress=False,
    )
    rows, losses, off_by_one = kept_rows_of(run.dir, 1), [], []
    assert len(rows) == 4 and {summary["teacher"] for summary, _ in rows} == {"add", "sort"}
    for summary, columns in rows:
        teacher, tokens = summary["teacher"], columns["tokens"]
        first, mask = int(columns["loss_mask"].argmax()), columns["loss_mask"]
        ids, written = columns[f"teacher_prompt_{teacher}"], tokens[first:]
        answer = next(
            row["answer"] for row in ROWS if f"<user>{row['messages'][0]['content']}<" in summary["prompt"]
        )
        assert answer in summary["teacher_prompts"][teacher] and answer not in summary["prompt"]
        whole, positions = np.concatenate([ids, written]), len(ids) + np.arange(len(written))
        p_PV = plain_logprobs(f"teacher-{teacher}", whole, positions)
        found = columns["teacher_logprobs"]
        assert np.allclose(p_PV[np.arange(len(written)), written], found, rtol=1e-5, atol=1e-5)
        best = np.take_along_axis(p_PV, columns["teacher_ids"].astype(int), 1)
        assert np.allclose(best, columns["teacher_topk_logprobs"], rtol=1e-5, atol=1e-5)
        q_PV = plain_logprobs("student", tokens, np.flatnonzero(mask))
        losses += (np.exp(p_PV) * (p_PV - q_PV)).sum(1).tolist()
        shifted = plain_logprobs(f"teacher-{teacher}", whole, positions - 1)
        off_by_one.append(np.abs(shifted[np.arange(len(written)), written] - found).max())
    assert run.metrics[0]["actor/loss"] == pytest.approx(np.mean(losses), abs=1e-5)
    assert min(off_by_one) > 0.01


def test_positions_off_by_one_fail_the_comparison_with_a_plain_forward(
    recipe: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shows that the test above can fail: here the teacher's prompt lacks its last token."""
    right = ScoreItem.after
    monkeypatch.setattr(ScoreItem, "after", lambda self, prompt: right(self, prompt[:-1]))
    with pytest.raises(AssertionError):
        test_scores_and_loss_equal_a_plain_forward_after_the_teachers_own_prompt(recipe)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"rollout__workers": 2}, id="workers"),
        pytest.param({"trainer__mode": "fully_async", "trainer__max_staleness": 0}, id="async"),
        pytest.param({"teachers__add__cache_bytes": 10**6}, id="cache"),
    ],
)
def test_workers_the_async_schedule_and_a_teacher_cache_give_the_same_bits(
    recipe: Make, more: dict[str, Any]
) -> None:
    one = understudy.train(recipe_with(recipe, "one"), progress=False)
    other = understudy.train(recipe_with(recipe, "other", **more), progress=False)
    assert bits(one.dir) == bits(other.dir)
    plain = understudy.train(recipe("plain", **SMALL), progress=False)
    assert one.metrics[0]["actor/loss"] != plain.metrics[0]["actor/loss"]


def test_fast_mode_with_teacher_prompts_has_nearly_the_first_loss_of_full_determinism(recipe: Make) -> None:
    """In fast mode, rows that end together share a scoring request; each must keep its own teacher's prompt."""
    full = understudy.train(recipe_with(recipe, "full"), progress=False)
    fast = understudy.train(recipe_with(recipe, "fast", run__determinism="fast"), progress=False)
    assert fast.metrics[0]["actor/loss"] == pytest.approx(full.metrics[0]["actor/loss"], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["row_journal.after_put:1", "sync.after_update:2"])
def test_a_killed_and_resumed_run_with_teacher_prompts_gives_the_same_bits(
    recipe: Make, tmp_path: Path, fault: str
) -> None:
    """One kill happens while rollouts are in the journal and their scores are not: the resume asks for scores again."""
    more = {"trainer__checkpoint_every": 1, "data__train": str(ASSETS / "data" / "train.jsonl")}
    table = recipe_with(recipe, "killed", **more)
    code, output = run_cli("train", str(write_toml(tmp_path / "r.toml", table)), "--quiet", fault=fault)
    assert code == -signal.SIGKILL, output
    code, output = call_cli("resume", table["run"]["dir"], "--quiet")
    assert code == 0, output
    straight = understudy.train(recipe_with(recipe, "straight", **more), progress=False)
    run = Path(table["run"]["dir"])
    assert bits(run) == bits(straight.dir)
    assert [one for one, _ in kept_rows_of(run, 2)] == [one for one, _ in kept_rows_of(straight.dir, 2)]
    report = audit(run)
    assert report.balanced and (report.trained, report.dead, report.in_flight) == (16, 0, 0), str(report)


def test_each_teacher_of_a_mixture_reads_its_own_prompt(recipe: Make) -> None:
    rows = [{**row, "teacher_weights": {"add": 0.25, "sort": 0.75}} for row in ROWS]
    run = understudy.train(recipe_with(recipe, "run", data__train=rows, loss__topk=4), progress=False)
    for summary, columns in kept_rows_of(run.dir, 1):
        assert summary["teacher"] == "add+sort" and summary["teacher_prompts"].keys() == {"add", "sort"}
        written = columns["tokens"][int(columns["loss_mask"].argmax()) :]
        mixed = np.zeros((len(written), VOCABULARY))
        for teacher, weight in (("add", 0.25), ("sort", 0.75)):
            ids = columns[f"teacher_prompt_{teacher}"]
            whole, at = np.concatenate([ids, written]), len(ids) + np.arange(len(written))
            mixed += weight * np.exp(plain_logprobs(f"teacher-{teacher}", whole, at))
        expected = np.log(mixed)[np.arange(len(written)), written]
        assert np.allclose(expected, columns["teacher_logprobs"], rtol=1e-5, atol=1e-5)
        named = np.take_along_axis(np.log(mixed), columns["teacher_ids"].astype(int), 1)
        assert np.allclose(named, columns["teacher_topk_logprobs"], rtol=1e-5, atol=1e-5)


def test_a_row_too_long_for_its_teacher_is_refused_at_start_or_becomes_a_dead_letter(
    recipe: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused at start for the length of the teacher's own prompt. With that check disabled, the row
    becomes a dead letter of the run."""
    rows = [{**row, "hint": "1" * 120 if i == 3 else "1"} for i, row in enumerate(ROWS[:8])]
    more: dict[str, Any] = {"data__train": rows, "data__shuffle": False, "trainer__steps": 1}
    more |= {f"teachers__{teacher}__prompt": "{{ hint }}{{ prompt }}" for teacher in TEACHER_PROMPTS}
    teacher = rows[3]["data_source"]
    with pytest.raises(UnderstudyError, match=rf"teacher {teacher}: .*holds 128 tokens"):
        understudy.train(recipe_with(recipe, "refused", **more), progress=False)
    monkeypatch.setattr("understudy.assembly.teachers.student_facts.longest_own_prompt", lambda *_: 1)
    run = understudy.train(recipe_with(recipe, "run", **more), progress=False)
    (letter,) = map(json.loads, (run.dir / "dataplane" / "dead_letters.jsonl").read_text().splitlines())
    assert letter["key"] == "00000-0000003_0_0" and "a sequence may have 128" in letter["reason"]
    assert audit(run.dir).trained == 7


def test_a_teacher_prompt_with_a_column_that_one_of_its_rows_lacks_is_refused(
    recipe: Make, tmp_path: Path
) -> None:
    rows = [dict(row) for row in ROWS[:8]]
    first = next(i for i, row in enumerate(rows) if row["data_source"] == "add")
    del rows[first]["answer"]
    table = recipe_with(recipe, "never", data__train=rows, data__reward=None)
    with pytest.raises(ConfigError, match=rf"row {first + 1}: teachers.add.prompt: 'answer' is undefined"):
        understudy.train(table, progress=False)
    table["teachers"]["add"]["prompt"] = "{{ prompt }}"
    assert understudy.train(table, progress=False).steps == 2, "no other teacher scores that row"


def test_distill_accepts_a_teacher_prompt(recipe: Make, tmp_path: Path) -> None:
    run = understudy.distill(
        student=ASSETS / "models" / "student",
        teacher=ASSETS / "models" / "teacher-add",
        teacher_prompt="{{ answer }}{{ prompt }}",
        data=[row for row in ROWS if row["data_source"] == "add"],
        progress=False,
        trainer__steps=1,
        trainer__batch_size=4,
        rollout__max_new_tokens=8,
        loss__topk=8,
        run__dir=str(tmp_path / "run"),
        run__threads=1,
    )
    assert all("teacher" in summary["teacher_prompts"] for summary, _ in kept_rows_of(run.dir, 1))
