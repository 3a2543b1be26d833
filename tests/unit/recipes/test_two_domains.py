"""The prompts of recipes/two-domains."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from understudy.rollout.rewards.builtin import exact_match

FOLDER = Path(__file__).parents[3] / "recipes" / "two-domains"


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("two-domains")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["make_data.py", "--out", str(out)])
        runpy.run_path(str(FOLDER / "make_data.py"), run_name="__main__")
    return out


def test_no_prompt_is_in_two_files(data: Path) -> None:
    names = ("train", "valid", "test", "past-train", "order-train")
    prompts = {name: [row["prompt"] for row in read(data / f"{name}.jsonl")] for name in names}
    assert len({prompt for some in prompts.values() for prompt in some}) == sum(map(len, prompts.values()))


def test_rows_alternate_between_both_domains_and_have_right_answers(data: Path) -> None:
    for name, size in (("train", 4000), ("valid", 200), ("test", 200)):
        rows = read(data / f"{name}.jsonl")
        assert [row["data_source"] for row in rows] == ["past", "order"] * (size // 2)
        assert all(exact_match(row, f" {row['answer']}") == 1.0 for row in rows)
    listed = [row for row in rows if row["data_source"] == "order"]
    for row in listed:
        words = row["answer"].rstrip(".").split(", ")
        assert words == sorted(words)
        assert set(words) == set(row["prompt"].removeprefix("Put in order: ").rstrip(".").split(", "))
    assert {"ran", "went", "saw"} & {word for row in rows for word in row["answer"].split()}


def test_rows_of_the_mixture_name_both_teachers(data: Path) -> None:
    for row, mixed in zip(read(data / "train.jsonl"), read(data / "mixture.jsonl"), strict=True):
        assert mixed == {**row, "teacher_weights": {"past": 0.5, "order": 0.5}}
