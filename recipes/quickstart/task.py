"""The quickstart task: two small domains whose answers a program can check.

    add    "12+34="   ->  "64"      two-digit addition, the sum written last digit first
    sort   "dbca="    ->  "abcd"    different letters put into alphabetical order

The sum is written in reverse because a left-to-right model then meets each digit after the carry that
decides it. Both domains fit a character vocabulary and end within eight tokens, so a whole training run
stays inside minutes on a laptop.

Splits never share a *family*: all questions that are the same problem in another order (12+34 and 34+12;
every shuffle of the letters a, b, c, d). A student therefore cannot answer a test question by remembering a
variant of it.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

SPLIT_SEED = 20260
TEST_PER_DOMAIN = 250
VALID_PER_DOMAIN = 250
PROMPTS_PER_DOMAIN = 5000

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SORT_LENGTHS = (4, 5, 6)
SORT_SFT_PROBLEMS = 40_000


@dataclass(frozen=True)
class Problem:
    """One question with its only right answer; `family` names the problem regardless of operand order."""

    domain: str
    question: str
    answer: str
    family: str


@dataclass(frozen=True)
class Splits:
    """Problems of one domain. `sft` holds `train`; `test` and `valid` share no family with it or each other."""

    test: list[Problem]
    valid: list[Problem]
    sft: list[Problem]

    @property
    def train(self) -> list[Problem]:
        """The prompts shipped for distillation."""
        return self.sft[:PROMPTS_PER_DOMAIN]


def addition(left: int, right: int) -> Problem:
    low, high = sorted((left, right))
    return Problem("add", f"{left}+{right}=", str(left + right)[::-1], f"{low}+{high}")


def sorting(letters: str) -> Problem:
    ordered = "".join(sorted(letters))
    return Problem("sort", f"{letters}=", ordered, ordered)


def _all_additions(rng: random.Random) -> Iterator[Problem]:
    pairs = [(left, right) for left in range(10, 100) for right in range(10, 100)]
    rng.shuffle(pairs)
    for left, right in pairs:
        yield addition(left, right)


def _endless_sortings(rng: random.Random) -> Iterator[Problem]:
    seen: set[str] = set()
    while True:
        letters = "".join(rng.sample(LETTERS, rng.choice(SORT_LENGTHS)))
        if letters not in seen:
            seen.add(letters)
            yield sorting(letters)


def _take_new_families(source: Iterator[Problem], count: int, families: set[str]) -> list[Problem]:
    """The next `count` problems whose family is not in `families` yet; adds theirs to it."""
    taken: list[Problem] = []
    while len(taken) < count:
        problem = next(source)
        if problem.family not in families:
            families.add(problem.family)
            taken.append(problem)
    return taken


def _split(source: Iterator[Problem], sft_limit: int | None) -> Splits:
    held_out: set[str] = set()
    test = _take_new_families(source, TEST_PER_DOMAIN, held_out)
    valid = _take_new_families(source, VALID_PER_DOMAIN, held_out)
    sft: list[Problem] = []
    for problem in source:
        if problem.family not in held_out:
            sft.append(problem)
        if len(sft) == sft_limit:
            break
    return Splits(test, valid, sft)


def _add_splits() -> Splits:
    return _split(_all_additions(random.Random(f"add/{SPLIT_SEED}")), sft_limit=None)


def _sort_splits() -> Splits:
    return _split(_endless_sortings(random.Random(f"sort/{SPLIT_SEED}")), sft_limit=SORT_SFT_PROBLEMS)


DOMAINS: dict[str, Callable[[], Splits]] = {"add": _add_splits, "sort": _sort_splits}


def make_splits() -> dict[str, Splits]:
    """The splits of every domain; the same ones on every call and every machine."""
    return {name: make() for name, make in DOMAINS.items()}


def interleave(columns: list[list[Problem]], seed: str) -> list[Problem]:
    """Deals one problem of each column per round, the round's order shuffled: every prefix is about even."""
    rng = random.Random(f"{seed}/{SPLIT_SEED}")
    mixed: list[Problem] = []
    for round_of_problems in zip(*columns, strict=True):
        hand = list(round_of_problems)
        rng.shuffle(hand)
        mixed.extend(hand)
    return mixed
