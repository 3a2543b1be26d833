"""The quickstart's problems: right answers, disjoint splits, and files that the script reproduces byte for byte."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from make_models import make_data
from task import PROMPTS_PER_DOMAIN, TEST_PER_DOMAIN, VALID_PER_DOMAIN, make_splits

from understudy.assets import QUICKSTART_SPLITS, quickstart_data, quickstart_model


def rows(split: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in quickstart_data(split).read_text(encoding="utf-8").splitlines()]


def question(row: dict[str, Any]) -> str:
    (message,) = row["messages"]
    assert message["role"] == "user"
    return message["content"]


def family(row: dict[str, Any]) -> tuple[str, ...]:
    """Identifies a problem independently of the order of its parts."""
    text = question(row).removesuffix("=")
    return tuple(sorted(text.split("+") if row["data_source"] == "add" else text))


@pytest.mark.parametrize("split", QUICKSTART_SPLITS)
def test_every_stored_answer_is_right(split: str) -> None:
    for row in rows(split):
        asked = question(row).removesuffix("=")
        if row["data_source"] == "add":
            left, right = map(int, asked.split("+"))
            assert min(left, right) >= 10 and max(left, right) <= 99
            assert int(row["answer"][::-1]) == left + right
        else:
            assert 4 <= len(asked) <= 6
            assert row["answer"] == "".join(sorted(asked))


def test_splits_share_no_problem_in_any_order() -> None:
    families = {split: {family(row) for row in rows(split)} for split in QUICKSTART_SPLITS}
    assert not families["train"] & families["test"]
    assert not families["valid"] & families["test"]
    assert not families["train"] & families["valid"]


def test_supervised_training_never_sees_a_held_out_problem() -> None:
    held_out = {family(row) for split in ("test", "valid") for row in rows(split)}
    for domain, splits in make_splits().items():
        seen = {
            tuple(sorted(text.split("+") if domain == "add" else text))
            for text in (problem.question.removesuffix("=") for problem in splits.sft)
        }
        assert not seen & held_out
        assert len(splits.sft) > PROMPTS_PER_DOMAIN


def test_both_domains_are_equally_frequent_in_every_50_rows() -> None:
    sizes = {"train": PROMPTS_PER_DOMAIN, "valid": VALID_PER_DOMAIN, "test": TEST_PER_DOMAIN}
    for split, per_domain in sizes.items():
        sources = [row["data_source"] for row in rows(split)]
        assert Counter(sources) == {"add": per_domain, "sort": per_domain}
        for start in range(0, len(sources), 50):
            assert Counter(sources[start : start + 50]) == {"add": 25, "sort": 25}
        assert sources != ["add", "sort"] * per_domain
        assert len({question(row) for row in rows(split)}) == 2 * per_domain


def test_the_script_writes_the_shipped_files_byte_for_byte(tmp_path: Path) -> None:
    make_data(make_splits(), tmp_path)
    for split in QUICKSTART_SPLITS:
        assert (tmp_path / f"{split}.jsonl").read_bytes() == quickstart_data(split).read_bytes()


def test_an_unknown_asset_is_refused_with_the_known_ones() -> None:
    with pytest.raises(KeyError, match=r"no quickstart asset 'techer-add'.*teacher-add"):
        quickstart_model("techer-add")
