"""Runs from Python: rows and rewards as objects, notebooks, interrupts, resuming and evaluating a run, wrong
arguments."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from api_runs import (
    ADD,
    SMALL,
    SORT,
    STUDENT,
    external,
    half_reward,
    interrupt_after,
    rows,
    run_in_notebook_cell,
)
from small_runs import call_cli

import understudy
from understudy.dataplane.ledger import audit
from understudy.errors import ConfigError, UnderstudyError
from understudy.observability.metrics import without_clock
from understudy.observability.rundir import read_json


def test_teacher_keys_that_map_to_the_same_name_give_two_teachers(
    distill: Callable[..., understudy.Run], teacher_urls: dict[str, str]
) -> None:
    data = [
        {**row, "data_source": key}
        for key, kind in (("a/b", "add"), ("a-b", "sort"))
        for row in rows(kind, 4)
    ]
    run = distill(
        teacher={"a/b": ADD, "a-b": SORT},
        data=data,
        trainer__steps=1,
        **external("a-b", teacher_urls["add"]),
        **external("a-b-2", teacher_urls["sort"]),
    )
    assert run.last["teacher/a-b/rows"] == run.last["teacher/a-b-2/rows"] == 4
    teachers = read_json(run.dir / "recipe.json")["teachers"]
    assert {name: (Path(one["model"]).name, one["key"]) for name, one in teachers.items()} == {
        "a-b": ("teacher-add", "a/b"),
        "a-b-2": ("teacher-sort", "a-b"),
    }


def test_a_teacher_key_that_matches_no_row_is_refused_before_a_run_directory_is_made(
    distill: Callable[..., understudy.Run], tmp_path: Path
) -> None:
    with pytest.raises(
        ConfigError, match=r"rows with data_source = 'add' have no teacher.*give the model alone"
    ):
        distill(teacher={"math": ADD})
    assert not (tmp_path / "run").exists()


def test_a_run_from_row_and_reward_objects_can_be_resumed_moved_and_evaluated(
    distill: Callable[..., understudy.Run],
) -> None:
    run = distill(eval_data=rows("sort", 4), reward=half_reward)
    assert run.status == "finished" and run.last["val/accuracy"] == 0.5
    assert repr(run) == f"Run(dir={run.dir!r}, steps=2)"  # what a notebook displays
    more = run.resume(progress=False, trainer__steps=3)
    assert more.steps == 3 and audit(run.dir).per_step == {1: 8, 2: 8, 3: 8}
    moved = understudy.Run.open(run.dir.rename(run.dir.with_name("moved")))
    assert moved.steps == 3 and moved.metrics == more.metrics
    assert moved.evaluate(progress=False)["accuracy"] == 0.5
    own = moved.evaluate(
        rows("add", 8), "understudy.rollout.rewards.builtin:exact_match", progress=False, samples=4
    )
    assert 0 <= own["accuracy"] <= 1 and own["failed"] == 0
    again = understudy.resume(moved.dir, progress=False, trainer__steps=4)
    assert again.steps == 4 and read_json(moved.dir / "recipe.json")["run"]["dir"] == str(moved.dir)
    with pytest.raises(ConfigError, match=r"cannot resume with loss.topk = 4"):
        again.resume(progress=False, loss__topk=4)


SCRIPT = """
import json, sys
import understudy

def length(row, text):
    return float(len(text))

if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    understudy.distill(**given, reward=length)
"""


def test_a_killed_script_with_its_own_rows_and_reward_is_resumed_by_the_resume_command(
    tmp_path: Path, teacher_urls: dict[str, str]
) -> None:
    script = tmp_path / "own_script.py"
    script.write_text(SCRIPT)
    given = {
        "student": str(STUDENT), "teacher": str(ADD), "data": rows("add"), "eval_data": rows("sort", 4), **SMALL,
        **external("teacher", teacher_urls["add"]), "trainer__steps": 3, "run__dir": str(tmp_path / "run"),
        "progress": False,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(given)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "UNDERSTUDY_FAULT": "sync.after_ack:2"},
        capture_output=True, text=True, check=False, timeout=150,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done
    assert read_json(tmp_path / "run" / "recipe.json")["data"]["reward"] == "own_script:length"
    code, output = call_cli("resume", str(tmp_path / "run"), "--quiet")
    assert code == 0, output
    report = audit(tmp_path / "run")
    assert report.balanced and report.per_step == {1: 8, 2: 8, 3: 8}


def test_a_run_inside_a_running_event_loop_gives_the_same_bits(
    distill: Callable[..., understudy.Run],
) -> None:
    plain = distill("plain", eval_data=rows("sort", 4), reward=half_reward)

    async def cell() -> tuple[understudy.Run, dict[str, float]]:
        run = distill("notebook", eval_data=rows("sort", 4), reward=half_reward)
        return run, run.evaluate(progress=False)

    run, measured = asyncio.run(cell())
    assert [without_clock(line) for line in run.metrics] == [without_clock(line) for line in plain.metrics]
    assert measured["accuracy"] == 0.5
    for name in ("model", "optimizer"):
        file = Path("checkpoints") / "step-000002" / f"{name}.safetensors"
        assert (run.dir / file).read_bytes() == (plain.dir / file).read_bytes()


def test_an_error_of_a_run_inside_a_running_event_loop_is_raised(
    distill: Callable[..., understudy.Run],
) -> None:
    async def cell() -> None:
        distill(trainer__max_dead_letters=0.0, rollout__agent=Broken)

    with pytest.raises(UnderstudyError, match="max_dead_letters"):
        asyncio.run(cell())


class Broken:
    async def run(self, prompt: Any, context: Any) -> Any:
        raise RuntimeError("no answer")


class Blocked:
    """Blocks the event loop in every rollout after the first epoch."""

    async def run(self, prompt: Any, context: Any) -> Any:
        from understudy.rollout.agents.single_turn import SingleTurn

        if prompt.epoch > 0:
            Path(os.environ["BLOCKED_MARK"]).touch()
            time.sleep(60)  # blocks the event loop, so it cannot react to a signal
        return await SingleTurn().run(prompt, context)


def test_an_interrupted_notebook_cell_saves_and_the_next_cell_resumes(
    distill: Callable[..., understudy.Run], tmp_path: Path
) -> None:
    interrupt_after(tmp_path / "run", steps=1)
    run = run_in_notebook_cell(lambda: distill(trainer__steps=5000, trainer__checkpoint_every=5000))
    assert run.status == "stopped" and 1 <= run.steps < 5000
    more = run_in_notebook_cell(lambda: run.resume(progress=False, trainer__steps=run.steps + 1))
    assert more.status == "finished" and audit(run.dir).trained == 8 * more.steps


def test_a_second_interrupt_ends_the_run_at_once_but_not_the_process(
    distill: Callable[..., understudy.Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "blocked"
    monkeypatch.setenv("BLOCKED_MARK", str(mark))

    def act() -> None:
        while not mark.exists():
            time.sleep(0.05)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)

    interrupter = threading.Thread(target=act, daemon=True)
    interrupter.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_in_notebook_cell(lambda: distill(trainer__steps=5000, rollout__agent=Blocked))
    interrupter.join()
    assert time.monotonic() - start < 40


def test_an_interrupt_while_the_run_starts_stops_it(
    distill: Callable[..., understudy.Run], tmp_path: Path
) -> None:
    def act() -> None:
        while not (tmp_path / "run" / "state.json").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=act, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run_in_notebook_cell(lambda: distill(trainer__steps=5000))
    assert read_json(tmp_path / "run" / "state.json")["status"] == "stopped"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"student": 3}, "student is a int; expected a hub id or the folder of a model"),
        ({"teacher": ["a", "b"]}, "teacher is a list; expected a hub id or the folder of a model"),
        ({"teacher": {}}, "teacher is an empty mapping"),
        ({"teacher": {3: "a"}}, "teacher has the key 3; expected {data_source: model}"),
        ({"teacher": {"a": None}}, r"teacher\['a'\] is a NoneType; expected a hub id"),
        ({"data": None}, "`?data.train`?"),
        ({"student": ""}, "student is empty; expected a hub id"),
        ({"data": [{"prompt": "1"}, {"answer": "2"}]}, "(^|\n)data.train, row 2 has no prompt"),
        ({"eval_data": []}, "dataset data.eval is empty"),
        ({"data": 7}, "data.train is a int; expected a path"),
        ({"eval_data": {"test": []}}, "data.eval holds several splits \\(test\\)"),
        ({"reward": 3}, r"reward is a int; expected a function \(row, text\)"),
        ({"reward": lambda row, text: 0.0}, "data.reward = .*is a lambda"),
        ({"data__train__x": 1}, "data.train.x = 1: `train` is a value, not a section"),
        ({"steps": 3}, "steps=3: it is `trainer.steps` here; write section and key as section__key"),
        ({"trainer": {"steps": 3}}, "trainer={'steps': 3}: write section and key as section__key"),
        ({"lr": 3}, "lr=3: it is `trainer.learning_rate` here"),
    ],
)
def test_wrong_arguments_of_distill_are_refused_with_one_line_messages(
    changes: dict[str, Any], message: str
) -> None:
    given: dict[str, Any] = {"student": STUDENT, "teacher": ADD, "data": rows("add", 1), "progress": False}
    with pytest.raises(UnderstudyError, match=message) as error:
        understudy.distill(**{**given, **changes})
    problems = error.value.problems if isinstance(error.value, ConfigError) else [str(error.value)]
    assert all("\n" not in problem for problem in problems)


def test_a_recipe_or_run_dir_of_the_wrong_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="recipe is a int; expected the path of a TOML file, a dict of tables"
    ):
        understudy.train(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="run_dir is a int; expected the path of a run directory"):
        understudy.resume(3)  # type: ignore[arg-type]
