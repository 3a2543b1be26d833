"""The generated word problems: reproducible, in disjoint splits, and with answers that this test computes independently."""

import json
import operator
import re
from collections.abc import Callable
from hashlib import sha256
from itertools import islice
from math import prod
from pathlib import Path

import pytest
from word_problems import KINDS, LEVELS, SIZES, Problem, make_splits, problems, write_splits

from understudy.rollout.dataset import load_dataset
from understudy.rollout.rewards.builtin import gsm8k

EQUATION = re.compile(r"^(?P<label>[^:]+): (?P<left>\d+) (?P<sign>[-+*/]) (?P<right>\d+) = (?P<result>\d+)$")
SIGNS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,
}
PROBLEMS_PER_LEVEL = 120
"""Problems that are checked per level."""


@pytest.fixture(params=sorted(LEVELS))
def level_problems(request: pytest.FixtureRequest) -> list[Problem]:
    return list(islice(problems(request.param, seed=3), PROBLEMS_PER_LEVEL))


def answer_of(problem: Problem) -> int:
    return int(problem.answer.rpartition("#### ")[2])


def numbers_in(text: str) -> list[int]:
    words = {"twice": " 2 ", "three times": " 3 "}
    for word, digits in words.items():
        text = text.replace(word, digits)
    return [int(number) for number in re.findall(r"\d+", text)]


def test_every_line_of_a_solution_is_right_and_uses_only_known_numbers(level_problems: list[Problem]) -> None:
    for problem in level_problems:
        *lines, last = problem.answer.splitlines()
        known, result = set(numbers_in(problem.question)), None
        for line in lines:
            found = EQUATION.match(line)
            assert found, line
            left, right, result = (int(found[name]) for name in ("left", "right", "result"))
            assert {left, right} <= known, f"{line!r} uses an unknown number: {problem.question}"
            assert SIGNS[found["sign"]](left, right) == result and result >= 0
            assert found["sign"] != "/" or left % right == 0
            known.add(result)
        assert last == f"#### {result}"
        assert tuple(numbers_in(problem.question)) == problem.numbers


def solve(problem: Problem) -> int:
    """Computes the answer from the text of the question alone."""
    question, numbers = problem.question, numbers_in(problem.question)
    if problem.kind in ("shop", "trip"):
        *pairs, whole = numbers
        return whole - sum(prod(pairs[i : i + 2]) for i in range(0, len(pairs), 2))
    if problem.kind == "share":
        pairs = [
            (int(a), int(b)) for a, b in re.findall(r"There are (?:also )?(\d+) \w+ with (\d+)", question)
        ]
        lost = sum(int(found) for found in re.findall(r"(\d+) of the \w+ are lost", question))
        each, rest = divmod(sum(a * b for a, b in pairs) - lost, numbers[-1])
        assert rest == 0
        return each
    held, total = 0, 0
    for sentence in re.split(r"(?<=\.) ", question)[:-1]:
        mentioned = numbers_in(sentence)
        if "fewer" in sentence or "gives" in sentence:
            held -= mentioned[0]
        elif "packs" in sentence:
            held += mentioned[0] * mentioned[1]
        elif "as many" in sentence:
            held *= mentioned[0]
        elif "more" in sentence or "another" in sentence:
            held += mentioned[0]
        else:
            held = mentioned[0]
        total += held
    return total if problem.kind == "compare" else held


def test_the_answer_follows_from_the_question(level_problems: list[Problem]) -> None:
    assert {problem.kind for problem in level_problems} == set(KINDS)
    for problem in level_problems:
        assert solve(problem) == answer_of(problem), problem


def test_the_gsm8k_reward_reads_the_answer_format(level_problems: list[Problem]) -> None:
    for problem in level_problems:
        row, right = problem.row(), answer_of(problem)
        assert gsm8k(row, problem.answer)["score"] == 1.0
        assert gsm8k(row, problem.answer.replace(f"#### {right}", f"#### {right + 1}"))["score"] == 0.0
        assert gsm8k(row, problem.answer.rpartition("####")[0])["score"] == 0.0


def test_generated_problems_have_the_recorded_digest() -> None:
    """Python's own generator gives the same draws on every machine and version; this digest shows that nothing else has an influence."""
    text = "".join(json.dumps(problem.row()) for problem in islice(problems(3, seed=2026), 500))
    assert sha256(text.encode()).hexdigest()[:16] == "c1e416efafa1badb"


def test_no_problem_is_in_two_splits_and_none_twice() -> None:
    splits = make_splits()
    assert {name: len(split) for name, split in splits.items()} == SIZES
    every = [problem.identity for split in splits.values() for problem in split]
    assert len(every) == len(set(every))
    questions = [{problem.question for problem in split} for split in splits.values()]
    assert sum(map(len, questions)) == len(set.union(*questions))


def test_held_out_problems_do_not_depend_on_the_number_of_training_problems() -> None:
    few = make_splits(sizes={"test": 10, "valid": 10, "make": 5, "train": 5})
    many = make_splits(sizes={"test": 10, "valid": 10, "make": 50, "train": 50})
    assert few["test"] == many["test"] and few["valid"] == many["valid"]


def test_a_level_without_further_problems_raises_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LEVELS, 1, type(LEVELS[1])((1, 1), 2, 3))
    with pytest.raises(ValueError, match="level 1 has no more problems"):
        list(islice(problems(1, seed=0), 10_000))


def test_written_splits_can_be_loaded_as_datasets(tmp_path: Path) -> None:
    write_splits(make_splits(sizes={"test": 10, "valid": 5, "make": 5, "train": 20}), tmp_path)
    dataset = load_dataset(tmp_path / "train.jsonl")
    assert len(dataset) == 20
    prompt = dataset.prompt(0, key="k", epoch=0)
    assert prompt.data_source in KINDS and prompt.messages[0]["role"] == "user"
