"""How a recipe stores rows and functions of a Python caller. What another process could not find is refused."""

import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from understudy.errors import ConfigError, UnderstudyError
from understudy.observability.rundir import RunDir, write_atomically
from understudy.rollout.rewards.builtin import exact_match
from understudy.run.given import name_of, storable


class Judge:
    def score(self, row: dict[str, Any], text: str) -> float:
        return 0.0

    @staticmethod
    def static(row: dict[str, Any], text: str) -> float:
        return 0.0

    def __call__(self, row: dict[str, Any], text: str) -> float:
        return 0.0


def test_functions_and_classes_become_import_names_in_the_recipe() -> None:
    table = {
        "data": {"train": Path("rows.jsonl"), "reward": exact_match},
        "rollout": {"agent": Judge, "agent_options": {"tool": {"tools": [Judge.static]}}},
    }
    with storable(table) as (plain, _):
        assert plain == {
            "data": {"train": "rows.jsonl", "reward": "understudy.rollout.rewards.builtin:exact_match"},
            "rollout": {
                "agent": "test_given:Judge",
                "agent_options": {"tool": {"tools": ["test_given:Judge.static"]}},
            },
            "run": {"python_path": [str(Path(__file__).parent)]},
        }


@pytest.mark.parametrize(
    ("thing", "message"),
    [
        (lambda row, text: 0.0, "is a lambda, and a resumed run could not import it; put it into a module"),
        (functools.partial(exact_match), "is a partial without a name"),
        (Judge(), "is a Judge without a name"),
        (Judge().score, "test_given:Judge.score is another object than the one given"),
    ],
)
def test_objects_that_another_process_could_not_import_are_refused(thing: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        name_of(thing, "data.reward")


def test_a_function_defined_inside_a_function_is_refused() -> None:
    def reward(row: dict[str, Any], text: str) -> float:
        return 0.0

    with pytest.raises(ConfigError, match=r"data.reward = test_.*reward is defined inside a function"):
        name_of(reward, "data.reward")


SCRIPT = """
from understudy.run.given import name_of
def reward(row, text):
    return 1.0
def main():
    print(name_of(reward, "data.reward"))
{call}
"""


@pytest.mark.parametrize(
    ("call", "how", "message"),
    [
        ("if __name__ == '__main__':\n    main()", ["train-it.py"], "train-it:reward\n"),
        ("if '__main__' == __name__:\n    main()", ["-m", "pack.inner"], "pack.inner:reward\n"),
        (
            "import threading\nif __name__ == '__main__':\n    t = threading.Thread(target=main); t.start(); t.join()",
            ["train-it.py"],
            "train-it:reward\n",
        ),
        ("main()", ["train-it.py"], "importing it again would start the run again: write the call under"),
        ("main()", ["-c"], "was typed into a notebook or an interpreter"),
    ],
)
def test_a_reward_defined_in_a_script_is_accepted_if_the_script_can_be_imported(
    tmp_path: Path, call: str, how: list[str], message: str
) -> None:
    script = SCRIPT.format(call=call)
    (tmp_path / "pack").mkdir()
    for place in ("train-it.py", "pack/__init__.py", "pack/inner.py"):
        (tmp_path / place).write_text("" if "init" in place else script)
    command = [sys.executable, *how, *([script] if how == ["-c"] else [])]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert message in done.stdout + done.stderr and (done.returncode == 0) == message.endswith("\n"), done


class Split:
    """Has the interface of `datasets.Dataset`: a length, columns, rows by iteration."""

    column_names = ("prompt", "answer")

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield {"prompt": "1+1=", "answer": np.int64(2), "ids": np.arange(2)}
        yield {"prompt": "é", "answer": None, "more": {"a": (1, 2)}}


def test_given_rows_are_written_to_files_in_a_temporary_folder(tmp_path: Path) -> None:
    expected = [{"prompt": "1+1=", "answer": 2, "ids": [0, 1]}, {"prompt": "é", "more": {"a": [1, 2]}}]
    given = {"data": {"train": Split(), "eval": (row for row in Split()), "shuffle": True}}
    with storable(given) as (plain, rows):
        for key in ("train", "eval"):
            lines = Path(plain["data"][key]).read_text().splitlines()
            assert [json.loads(line) for line in lines] == expected
        assert plain["data"]["shuffle"] is True and set(rows.folder.iterdir()) == {
            Path(plain["data"][key]) for key in ("train", "eval")
        }
    assert not rows.folder.exists()


def test_a_list_of_paths_is_not_taken_for_rows() -> None:
    with storable({"data": {"train": [Path("a.jsonl"), "b.jsonl"]}}) as (plain, rows):
        assert plain["data"]["train"] == ["a.jsonl", "b.jsonl"] and not list(rows.folder.iterdir())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (3, r"data\.train is a int; expected a path, a list of paths, or rows"),
        (
            {"train": [], "test": []},
            r"data\.train holds several splits \(train, test\); give one of them",
        ),
        (
            [{"prompt": "a"}, "b"],
            r"data\.train, row 2 is a str; expected an object with `prompt` or `messages`",
        ),
        (
            [{"prompt": "a", "x": object()}],
            r"data\.train, row 1: column `x` holds a object, which a row cannot keep",
        ),
        (b"rows", r"data\.train is a bytes"),
    ],
)
def test_data_that_are_not_rows_are_refused_with_the_reason(data: Any, message: str) -> None:
    with pytest.raises(UnderstudyError, match=message), storable({"data": {"train": data}}):
        pass


def test_the_recipe_of_a_moved_run_directory_has_its_data_at_the_new_path(tmp_path: Path) -> None:
    run, outside = RunDir(tmp_path / "run"), str(tmp_path / "prompts.jsonl")
    run.path.mkdir()
    table = {"run": {"dir": "run"}, "data": {"train": ["run/data/train.jsonl", outside], "eval": "running"}}
    write_atomically(run.recipe, json.dumps(table))
    moved = RunDir(run.path.rename(tmp_path / "moved"))
    assert moved.read_recipe() == {
        "run": {"dir": str(moved.path)},
        "data": {"train": [str(moved.data / "train.jsonl"), outside], "eval": "running"},
    }
