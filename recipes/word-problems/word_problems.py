"""Generates word problems with worked steps: any number, any difficulty, the same on every machine.

    python recipes/word-problems/word_problems.py --out DIR [--level 4] [--seed 2026]

    Q  "Mia buys 4 pens for 7 coins each and 3 maps for 12 coins each. She pays with 90 coins. How many coins does she get back?"
    A  "4 pens: 4 * 7 = 28 / 3 maps: 3 * 12 = 36 / In all: 28 + 36 = 64 / Back: 90 - 64 = 26 / #### 26"     (/ is a new line)

Five kinds of story, each its own `data_source`. The level sets how many parts a story has and how large its
numbers are. Every line of an answer but the last is one equation; the last is `#### number`, as in GSM8K, so
the same reward grades it.

Two problems are the same if their kind and their numbers in order of appearance agree, whatever the names
and things. A problem appears once in all splits together: no model trained on `make` or `train` has seen a
problem of `valid` or `test`.
"""

import argparse
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

SEED = 2026
LEVEL = 4
SIZES = {"test": 500, "valid": 300, "make": 12_000, "train": 16_000}
"""`make` is for making the models, `train` for the runs that are compared."""
_TRIES = 1000
"""Consecutive draws that may all be duplicates, until a level counts as used up."""

NAMES = [
    "Mia",
    "Tom",
    "Lena",
    "Omar",
    "Ruth",
    "Ivan",
    "Nora",
    "Paul",
    "Zoe",
    "Karl",
    "Ada",
    "Hugo",
    "Ines",
    "Yusuf",
    "Clara",
    "Sam",
]
THINGS = [
    "pens",
    "maps",
    "cups",
    "keys",
    "bells",
    "stamps",
    "ribbons",
    "candles",
    "buttons",
    "shells",
    "marbles",
    "badges",
]
PLACES = ["the lake", "the old mill", "the harbour", "the castle", "the next town", "the museum"]
CONTAINERS = ["box", "basket", "crate", "drawer", "bag", "jar"]


@dataclass(frozen=True)
class Level:
    """Difficulty: least and most `parts` of a story, and the largest small number (a count) and large number
    (a price)."""

    parts: tuple[int, int]
    small: int
    large: int


LEVELS = {
    1: Level((2, 2), 9, 12),
    2: Level((2, 3), 9, 20),
    3: Level((3, 3), 9, 40),
    4: Level((3, 4), 12, 80),
    5: Level((4, 5), 15, 99),
}


@dataclass(frozen=True)
class Problem:
    kind: str
    question: str
    answer: str
    """Worked steps, then `#### number`."""
    numbers: tuple[int, ...]
    """The numbers of the question, in order."""

    @property
    def identity(self) -> tuple[str, tuple[int, ...]]:
        return self.kind, self.numbers

    def row(self) -> dict[str, object]:
        """The row of an Understudy dataset."""
        chat = [{"role": "user", "content": self.question}]
        return {"messages": chat, "data_source": self.kind, "answer": self.answer}


@dataclass
class Draft:
    """A problem being written: sentences, equations, and the numbers used so far."""

    rng: random.Random
    level: Level
    sentences: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)

    def parts(self) -> int:
        return self.rng.randint(*self.level.parts)

    def small(self) -> int:
        return self.record(self.rng.randint(2, self.level.small))

    def large(self) -> int:
        return self.record(self.rng.randint(3, self.level.large))

    def record(self, number: int) -> int:
        self.numbers.append(number)
        return number

    def say(self, sentence: str) -> None:
        self.sentences.append(sentence)

    def work(self, label: str, left: int, sign: str, right: int) -> int:
        """One worked line; returns its result."""
        result = _RESULTS[sign](left, right)
        self.lines.append(f"{label}: {left} {sign} {right} = {result}")
        return result

    def finish(self, kind: str, answer: int) -> Problem:
        worked = "\n".join([*self.lines, f"#### {answer}"])
        return Problem(kind, " ".join(self.sentences), worked, tuple(self.numbers))


_RESULTS: dict[str, Callable[[int, int], int]] = {
    "+": lambda left, right: left + right,
    "-": lambda left, right: left - right,
    "*": lambda left, right: left * right,
    "/": lambda left, right: left // right,
}


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def _totalled(draft: Draft, label: str, amounts: list[int]) -> int:
    total = amounts[0]
    for amount in amounts[1:]:
        total = draft.work(label, total, "+", amount)
    return total


def shop(draft: Draft) -> Problem:
    """Several things at a price each; money back."""
    rng, name = draft.rng, draft.rng.choice(NAMES)
    things = rng.sample(THINGS, draft.parts())
    counts, prices, bought = [], [], []
    for thing in things:
        counts.append(draft.small())
        prices.append(draft.large())
        bought.append(f"{counts[-1]} {thing} for {prices[-1]} coins each")
    draft.say(rng.choice(["{} buys {}.", "At the market {} takes {}."]).format(name, _listed(bought)))
    costs = [
        draft.work(f"{count} {thing}", count, "*", price)
        for count, thing, price in zip(counts, things, prices, strict=True)
    ]
    total = _totalled(draft, "In all", costs)
    paid = draft.record((total // 10 + rng.randint(1, 4)) * 10)
    draft.say(f"{name} pays with {paid} coins. How many coins does {name} get back?")
    return draft.finish("shop", draft.work("Back", paid, "-", total))


def stock(draft: Draft) -> Problem:
    """A collection that grows and shrinks."""
    rng, name, thing = draft.rng, draft.rng.choice(NAMES), draft.rng.choice(THINGS)
    held = draft.large()
    draft.say(f"{name} has {held} {thing}.")
    for _ in range(draft.parts()):
        event = rng.choice(["found", "gift", "packs", "times"])
        if event == "gift" and held > 4:
            given = draft.record(rng.randint(2, min(held - 1, draft.level.large)))
            draft.say(f"{name} gives {given} of them to {rng.choice([one for one in NAMES if one != name])}.")
            held = draft.work("After giving", held, "-", given)
        elif event == "packs":
            packs, each = draft.small(), draft.small()
            draft.say(f"Then {name} gets {packs} packs of {each} {thing}.")
            held = draft.work("With the packs", held, "+", draft.work("The packs hold", packs, "*", each))
        elif event == "times" and held <= draft.level.large:
            factor, word = rng.choice([(2, "twice"), (3, "three times")])
            draft.say(f"A week later {name} has {word} as many.")
            draft.record(factor)
            held = draft.work("A week later", held, "*", factor)
        else:
            found = draft.large()
            draft.say(rng.choice(["{} finds {} more.", "{} wins another {}."]).format(name, found))
            held = draft.work("With the new ones", held, "+", found)
    draft.say(f"How many {thing} does {name} have now?")
    return draft.finish("stock", held)


def trip(draft: Draft) -> Problem:
    """Legs of a way at a speed each; what is left of it."""
    rng, name, place = draft.rng, draft.rng.choice(NAMES), draft.rng.choice(PLACES)
    ways = [("walks", "on foot"), ("rides", "by bicycle"), ("goes by boat", "by boat"), ("drives", "by car")]
    gone = []
    legs = rng.sample(ways, min(draft.parts(), len(ways)))
    for index, (verb, label) in enumerate(legs):
        hours, speed = draft.small(), draft.large()
        start = f"On the way to {place} {name}" if index == 0 else f"Then {name}"
        draft.say(f"{start} {verb} for {hours} hours at {speed} km per hour.")
        gone.append(draft.work(label.capitalize(), hours, "*", speed))
    done = _totalled(draft, "So far", gone)
    whole = draft.record(done + rng.randint(2, draft.level.large))
    draft.say(f"The whole way is {whole} km. How many km are left?")
    return draft.finish("trip", draft.work("Left", whole, "-", done))


def share(draft: Draft) -> Problem:
    """Containers emptied together and divided evenly."""
    rng, thing = draft.rng, draft.rng.choice(THINGS)
    people = rng.randint(2, min(draft.level.small, 9))
    held, kinds = [], rng.sample(CONTAINERS, draft.parts())
    for index, container in enumerate(kinds):
        count, each = draft.small(), draft.small()
        held.append(count * each)
        label, plural = f"{container}es" if container == "box" else f"{container}s", f"{each} {thing} in each"
        draft.say(
            f"There are {count} {label} with {plural}."
            if index == 0
            else f"There are also {count} {label} with {plural}."
        )
        draft.work(label.capitalize(), count, "*", each)
    total = _totalled(draft, "In all", held)
    left, lost = total, total % people
    if lost:
        lost += people if lost == 1 or (total > 3 * people and rng.random() < 0.5) else 0
        draft.say(f"{draft.record(lost)} of the {thing} are lost.")
        left = draft.work("After the loss", total, "-", lost)
    draft.say(f"{draft.record(people)} children share the {thing} evenly. How many does each child get?")
    return draft.finish("share", draft.work("Each", left, "/", people))


def compare(draft: Draft) -> Problem:
    """Each has so many more, fewer or times as many as the one before; all together."""
    rng, thing = draft.rng, draft.rng.choice(THINGS)
    people = rng.sample(NAMES, draft.parts() + 1)
    amounts = [draft.large()]
    draft.say(f"{people[0]} has {amounts[0]} {thing}.")
    for before, name in pairwise(people):
        held = amounts[-1]
        how = rng.choice(["more", "fewer", "times"])
        if how == "fewer" and held > 5:
            by = draft.record(rng.randint(2, held - 2))
            draft.say(f"{name} has {by} fewer than {before}.")
            amounts.append(draft.work(name, held, "-", by))
        elif how == "times" and held <= draft.level.large:
            by = draft.record(rng.randint(2, 4))
            draft.say(f"{name} has {by} times as many as {before}.")
            amounts.append(draft.work(name, held, "*", by))
        else:
            by = draft.large()
            draft.say(f"{name} has {by} more than {before}.")
            amounts.append(draft.work(name, held, "+", by))
    draft.say(f"How many {thing} do they have together?")
    return draft.finish("compare", _totalled(draft, "Together", amounts))


KINDS: dict[str, Callable[[Draft], Problem]] = {
    "shop": shop,
    "stock": stock,
    "trip": trip,
    "share": share,
    "compare": compare,
}


def problems(level: int, seed: int) -> Iterator[Problem]:
    """Endless, all kinds in turn, no problem twice."""
    rng, seen = random.Random(f"word problems/{level}/{seed}"), set()
    while True:
        for write in KINDS.values():
            for _ in range(_TRIES):
                problem = write(Draft(rng, LEVELS[level]))
                if problem.identity not in seen:
                    break
            else:
                raise ValueError(
                    f"level {level} has no more problems of kind {write.__name__!r} than {len(seen)} in all kinds"
                )
            seen.add(problem.identity)
            yield problem


def make_splits(
    level: int = LEVEL, seed: int = SEED, sizes: dict[str, int] | None = None
) -> dict[str, list[Problem]]:
    """The same problems on every call and every machine; the held-out splits are drawn first, so they do not
    depend on the sizes of the rest."""
    source = problems(level, seed)
    return {name: [next(source) for _ in range(size)] for name, size in (sizes or SIZES).items()}


def write_splits(splits: dict[str, list[Problem]], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, split in splits.items():
        text = "".join(json.dumps(problem.row()) + "\n" for problem in split)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
        print(f"{name}.jsonl: {len(split)} problems")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "data", help="gets the jsonl files"
    )
    parser.add_argument("--level", type=int, choices=sorted(LEVELS), default=LEVEL, help="how hard")
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args()
    write_splits(make_splits(options.level, options.seed), options.out)


if __name__ == "__main__":
    main()
