"""Training data of a run: several files, overlong rows dropped or truncated, a number of passes, relative paths."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_runs import ASSETS, call_cli, run_cli, write_toml

import understudy
from understudy.config import parse_recipe
from understudy.dataplane.ledger import audit
from understudy.errors import DataError
from understudy.observability.metrics import without_clock
from understudy.policy.load import load_tokenizer
from understudy.rollout.render import Renderer
from understudy.run.launch import resume
from understudy.trainers.prompt_data import PromptData, open_data

Make = Callable[..., dict[str, Any]]
ROWS = [json.loads(line) for line in (ASSETS / "data" / "train.jsonl").read_text().splitlines()[:24]]
LONG = {"messages": [{"role": "user", "content": "1" * 30}], "data_source": "add", "answer": "1"}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def recipe_with_passes(recipe: Make, name: str, passes: float, **more: Any) -> dict[str, Any]:
    table = recipe(name, trainer__batch_size=8, **more)
    del table["trainer"]["steps"]
    table["trainer"]["passes"] = passes
    return table


def metric_lines(run: understudy.Run) -> list[dict[str, Any]]:
    return [without_clock(line) for line in run.metrics]


def test_dropping_overlong_rows_gives_the_same_run_as_data_without_them(recipe: Make, tmp_path: Path) -> None:
    """Three batches are one pass. A run of half a pass that is resumed for the other half also gives the same bits."""
    plain = understudy.train(
        recipe_with_passes(recipe, "plain", 1.0, data__train=write_rows(tmp_path / "all.jsonl", ROWS)),
        progress=False,
    )
    assert plain.steps == 3 and json.loads((plain.dir / "recipe.json").read_text())["trainer"]["steps"] == 3
    write_rows(tmp_path / "part-1.jsonl", [LONG, *ROWS[:9]])
    write_rows(tmp_path / "part-2.jsonl", [*ROWS[9:], LONG])
    settings = {
        "data__train": str(tmp_path / "part-*.jsonl"),
        "data__max_prompt_tokens": 20,
        "data__overlong": "drop",
    }
    first = understudy.train(recipe_with_passes(recipe, "parts", 0.5, **settings), progress=False)
    assert first.steps == 2
    whole = asyncio.run(resume(first.dir, ["trainer.passes=1"], progress=False))
    assert metric_lines(whole) == metric_lines(plain) and audit(whole.dir).balanced
    # A glob is fixed when a run starts: another file changes nothing, another row in one of its files does.
    write_rows(tmp_path / "part-3.jsonl", [LONG])
    again = asyncio.run(resume(first.dir, ["trainer.passes=1"], progress=False))
    assert metric_lines(again) == metric_lines(plain)
    write_rows(tmp_path / "part-2.jsonl", [*ROWS[9:], LONG, LONG])
    with pytest.raises(DataError, match="cannot resume: the saved data position was made with dataset"):
        asyncio.run(resume(first.dir, ["trainer.passes=2"], progress=False))


def test_rows_are_routed_by_a_numeric_teacher_key(recipe: Make, tmp_path: Path) -> None:
    """Teachers' keys are strings. A row whose number matched none of them would silently go to the default teacher."""
    rows = [{**row, "level": 1 if row["data_source"] == "add" else 2} for row in ROWS[:8]]
    keys = {"data__teacher_key": "level", "teachers__add__key": "1", "teachers__sort__key": "2"}
    more = {"data__default_teacher": "add", "trainer__steps": 1, "trainer__batch_size": 8, **keys}
    train = write_rows(tmp_path / "numbered.jsonl", rows)
    run = understudy.train(recipe("numbered", data__train=train, **more), progress=False)
    assert 0 < run.last["teacher/sort/rows"] == sum(row["level"] == 2 for row in rows) < len(rows)


def test_a_run_with_relative_paths_can_be_resumed_evaluated_and_exported_from_another_folder(
    recipe: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths that do not exist beside the recipe are relative to the folder in which `train` ran; later commands
    must find them from any folder."""
    here = tmp_path / "here"
    here.mkdir()
    (here / "student").symlink_to(ASSETS / "models" / "student")
    write_rows(here / "rows.jsonl", ROWS)
    (tmp_path / "recipes").mkdir()
    table = recipe(trainer__steps=1, trainer__batch_size=4, data__train="rows.jsonl", data__eval="rows.jsonl")
    table["student"]["model"], table["run"]["dir"] = "student", "out"
    path = write_toml(tmp_path / "recipes" / "recipe.toml", table)
    monkeypatch.chdir(here)
    code, output = call_cli("train", str(path), "--quiet", "trainer.eval_samples=2")
    assert code == 0, output
    monkeypatch.chdir(tmp_path / "recipes")
    for words in (
        ("resume", "../here/out", "--quiet", "trainer.steps=2", "run.python_path=['code']"),
        ("eval", "../here/out", "--samples", "2"),
        ("export", "../here/out", "exported"),
    ):
        code, output = call_cli(*words)
        assert code == 0, output
    stored = json.loads((here / "out" / "recipe.json").read_text())
    assert stored["run"]["python_path"] == [str(tmp_path / "recipes" / "code")]


@pytest.mark.timeout(120)
def test_rows_with_truncated_prompts_are_trained_with_a_rollout_worker(recipe: Make, tmp_path: Path) -> None:
    rows = [
        {**row, "messages": [{"role": "user", "content": "9" * 30 + row["messages"][0]["content"]}]}
        for row in ROWS
    ]
    settings = {
        "data__train": write_rows(tmp_path / "long.jsonl", rows), "data__max_prompt_tokens": 12,
        "data__overlong": "truncate_left", "trainer__mode": "fully_async", "run__determinism": "fast",
    }  # fmt: skip
    run = understudy.train(
        recipe_with_passes(recipe, "cut", 0.5, **settings, rollout__workers=1), progress=False
    )
    assert run.steps == 2 and audit(run.dir).balanced
    assert (audit(run.dir).trained, audit(run.dir).dead) == (16, 0)


def test_a_prompt_s_length_limit_comes_from_the_context_of_its_own_teacher(tmp_path: Path) -> None:
    """A teacher's short context truncates or drops the rows that it scores, and no others."""
    rows = [
        {"messages": [{"role": "user", "content": "1" * size}], "data_source": source}
        for source in ("add", "sort")
        for size in (5, 40)
    ]
    table: dict[str, Any] = {
        "student": {"model": str(ASSETS / "models" / "student")},
        "teachers": {
            name: {"model": str(ASSETS / "models" / f"teacher-{name}"), "key": name, "context_length": room}
            for name, room in (("add", 30), ("sort", 60))
        },
        "rollout": {"max_new_tokens": 8},
        "data": {"train": write_rows(tmp_path / "rows.jsonl", rows), "overlong": "drop"},
    }

    def opened() -> PromptData:
        recipe = parse_recipe(table)
        return open_data(recipe.data, recipe.rollout, recipe.student, recipe.teachers)

    kept = opened()
    assert [(row["data_source"], len(row["messages"][0]["content"])) for row in kept.train.rows] == [
        ("add", 5), ("sort", 5), ("sort", 40),
    ]  # fmt: skip
    table["data"]["overlong"] = "truncate_left"
    cut = opened().train
    assert len(cut) == 4 and list(cut.limits) == [None, 21, None, None]
    renderer = Renderer(load_tokenizer(table["student"]["model"]), context=128, reserve=8, truncate=True)
    prompts = [cut.prompt(i, key=str(i), epoch=0) for i in range(4)]
    whole = [renderer.render(replace(prompt, max_tokens=None)) for prompt in prompts]
    renderer.ahead(prompts)
    assert [len(renderer.render(prompt)) for prompt in prompts] == [
        len(whole[0]),
        21,
        len(whole[2]),
        len(whole[3]),
    ]
    assert renderer.render(prompts[1]).tolist() == whole[1][-21:].tolist()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_rows_of_teachers_with_different_context_lengths_are_trained_in_one_run(
    recipe: Make, tmp_path: Path
) -> None:
    rows = [
        {
            **row,
            "messages": [{"role": "user", "content": "9" * size + row["messages"][0]["content"]}],
            "data_source": source,
        }
        for row, source, size in zip(ROWS, ["add", "sort"] * len(ROWS), [40, 60] * len(ROWS), strict=False)
    ]
    teachers = {
        name: {"model": str(ASSETS / "models" / f"teacher-{name}"), "key": name, "context_length": room}
        for name, room in (("add", 30), ("sort", 100))
    }
    settings = {
        "data__train": write_rows(tmp_path / "long.jsonl", rows), "data__overlong": "truncate_left", "teachers": teachers,
    }  # fmt: skip
    run = understudy.train(
        recipe_with_passes(recipe, "cut", 0.5, **settings, rollout__workers=1), progress=False
    )
    assert run.steps == 2 and (audit(run.dir).trained, audit(run.dir).dead) == (16, 0)


OWN_MODULE = """
from understudy.rollout.agents.single_turn import SingleTurn
from understudy.rollout.tools.base import ToolOutcome
from understudy.rollout.tools.library import build_tool
from understudy.rollout.tools.sandbox import Isolation, Sandbox

def double(x: int) -> int:
    return 2 * x

def reward(row, text):
    return float(len(text))

class Loop(SingleTurn):
    def __init__(self):
        self.tool = build_tool("own_parts:double", Sandbox(Isolation.NONE, 512))

    async def run(self, prompt, context):
        result = await self.tool.call({"x": 21}, deadline_s=60)
        assert (result.outcome, result.text) == (ToolOutcome.OK, "42"), result
        return await super().run(prompt, context)

    async def close(self):
        await self.tool.close()
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_reward_agent_loop_and_tool_are_imported_from_the_recipe_s_folder(
    recipe: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the trainer, a worker and the tool processes, and again when the run is resumed from another folder."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "own_parts.py").write_text(OWN_MODULE)
    settings = {"data__reward": "own_parts:reward", "rollout__agent": "own_parts:Loop", "rollout__workers": 1}
    table = recipe("own", trainer__steps=1, trainer__batch_size=4, trainer__checkpoint_every=1, **settings)
    path = write_toml(tmp_path / "project" / "recipe.toml", table)
    code, output = call_cli("train", str(path), "--quiet")
    assert code == 0, output
    monkeypatch.chdir("/")
    code, output = run_cli("resume", str(tmp_path / "own"), "trainer.steps=2", "rollout.workers=0", "--quiet")
    assert code == 0, output
    assert audit(tmp_path / "own").trained == 8
