"""The calculator task: arithmetic too large for a tiny model, but easy with a tool.

    "347 times 86 minus 12"   ->  call the calculator with "347*86-12", then say "29830"

A training conversation is a list of turns. Some hold a wrong call and the error that came back: the
assistant then calls again. Wrong calls are never trained on. `from_the_head` gives the answer of an
assistant that does not use tools.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass

from chat import call_text

from understudy.rollout.tools.calculator import calculator

SPLIT_SEED = 20265
TEST, VALID, PROMPTS = 250, 250, 4000
SFT = 40_000
SIGNS = {"plus": "+", "minus": "-", "times": "*"}


@dataclass(frozen=True)
class Problem:
    question: str
    expression: str
    answer: str


@dataclass(frozen=True)
class Turn:
    """`trained` is False for the user, the tool, and the assistant's mistakes."""

    role: str
    content: str
    trained: bool = False


@dataclass(frozen=True)
class Splits:
    """`sft` holds `train`; no question of `test` or `valid` is in it."""

    test: list[Problem]
    valid: list[Problem]
    sft: list[Problem]

    @property
    def train(self) -> list[Problem]:
        """The prompts shipped for distillation."""
        return self.sft[:PROMPTS]


def _number(rng: random.Random) -> int:
    return rng.randint(10, 99) if rng.random() < 0.5 else rng.randint(100, 999)


def _problems(rng: random.Random) -> Iterator[Problem]:
    seen: set[str] = set()
    while True:
        numbers = [_number(rng) for _ in range(rng.choice((2, 3)))]
        words = [rng.choice(list(SIGNS)) for _ in numbers[1:]]
        question, expression = str(numbers[0]), str(numbers[0])
        for word, number in zip(words, numbers[1:], strict=True):
            question += f" {word} {number}"
            expression += f"{SIGNS[word]}{number}"
        if question not in seen:
            seen.add(question)
            yield Problem(question, expression, calculator(expression))


def make_splits() -> Splits:
    """The same problems on every call and every machine."""
    source = _problems(random.Random(f"calculator/{SPLIT_SEED}"))
    test, valid, sft = ([next(source) for _ in range(count)] for count in (TEST, VALID, SFT))
    return Splits(test, valid, sft)


def conversation(problem: Problem, mistakes: random.Random | None = None) -> list[Turn]:
    """A correct conversation for this problem; with `mistakes`, after a first call that went wrong."""
    turns = [Turn("user", problem.question)]
    if mistakes is not None:
        turns += _mistake(problem, mistakes)
    turns += [Turn("assistant", call_text(problem.expression), trained=True)]
    turns += [Turn("tool", problem.answer), Turn("assistant", problem.answer, trained=True)]
    return turns


def from_the_head(problem: Problem) -> list[Turn]:
    """The answer without the calculator, which a small model can only guess."""
    return [Turn("user", problem.question), Turn("assistant", problem.answer, trained=True)]


def _mistake(problem: Problem, rng: random.Random) -> list[Turn]:
    """A wrong call, and the tool loop's reply to it."""
    good = call_text(problem.expression)
    kind = rng.randrange(3)
    if kind == 0:  # an expression that ends in a sign, or begins with one that cannot
        spoilt = rng.choice([problem.expression + rng.choice("+-*"), "*" + problem.expression])
        return [
            Turn("assistant", call_text(spoilt)),
            Turn("tool", f"Error: ValueError: cannot read {spoilt!r} as arithmetic"),
        ]
    if kind == 1:  # the end is missing
        cut = rng.choice(["}", "}}", '"}}'])
        body = good.removesuffix("</tool_call>").removesuffix(cut)
        return [Turn("assistant", body + "</tool_call>"), Turn("tool", f"Error: {_json_error(body)}")]
    unclosed = good.removesuffix("</tool_call>")
    return [
        Turn("assistant", unclosed),
        Turn("tool", "Error: the <tool_call> was not closed with </tool_call>"),
    ]


def _json_error(text: str) -> str:
    try:
        json.loads(text.removeprefix("<tool_call>"))
    except json.JSONDecodeError as error:
        return f"the tool call is not JSON: {error.msg} at character {error.pos}"
    raise AssertionError(f"{text} is sound JSON")
