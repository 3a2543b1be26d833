"""Writes the prompts of this recipe: sentences to put into the past tense, and words to put in alphabetical order.

    python recipes/two-domains/make_data.py [--out DIR]

    past    "Say it in the past: Mia sees a big dog and goes home."     "Mia saw a big dog and went home."
    order   "Put in order: frog, apple, dog."                           "apple, dog, frog."

A row's `data_source` is its domain. The files are the same on every machine: for each domain NAME-train.jsonl to train its teacher,
and for both domains, in turn, train.jsonl for the student, valid.jsonl and test.jsonl. No prompt is in two of them. mixture.jsonl
has the rows of train.jsonl, each to be scored by a mixture of both teachers. The words begin with different letters.
"""

import argparse
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SEED = 2026
SIZES = {"test": 100, "valid": 100, "train": 2000}
"""Rows of each domain."""
TEACHER_ROWS = 4000
"""Rows that a domain's teacher is trained on."""

NAMES = ["Anna", "Ben", "Lily", "Tom", "Sue", "Max", "Mia", "Jack", "Sara", "Tim", "Amy", "Sam"]
ACTIONS = [
    ("runs to the park", "ran to the park"), ("sees a big dog", "saw a big dog"),
    ("finds a red ball", "found a red ball"), ("eats an apple", "ate an apple"),
    ("sings a song", "sang a song"), ("makes a cake", "made a cake"),
    ("gives Mom a flower", "gave Mom a flower"), ("takes a toy car", "took a toy car"),
    ("goes home", "went home"), ("sits under a tree", "sat under a tree"),
    ("hears a bird", "heard a bird"), ("draws a house", "drew a house"),
    ("reads a book", "read a book"), ("drinks some milk", "drank some milk"),
    ("loses a hat", "lost a hat"), ("wins a game", "won a game"),
    ("swims in the lake", "swam in the lake"), ("falls into the mud", "fell into the mud"),
    ("tells a story", "told a story"), ("buys a kite", "bought a kite"),
    ("feeds the cat", "fed the cat"), ("climbs a hill", "climbed a hill"),
    ("jumps over a stone", "jumped over a stone"), ("hides behind a door", "hid behind a door"),
]  # fmt: skip
WORDS = [
    "apple", "bear", "cake", "dog", "egg", "frog", "garden", "house", "ice", "jar", "king", "lion",
    "moon", "nest", "owl", "pig", "queen", "rain", "sun", "tree", "uncle", "van", "water", "zoo",
]  # fmt: skip
Row = dict[str, Any]


def past(rng: random.Random) -> Row:
    name = rng.choice(NAMES)
    now, then = zip(*rng.sample(ACTIONS, rng.randint(1, 3)), strict=True)
    return {
        "prompt": f"Say it in the past: {name} {' and '.join(now)}.",
        "answer": f"{name} {' and '.join(then)}.",
    }


def order(rng: random.Random) -> Row:
    words = rng.sample(WORDS, rng.randint(3, 5))
    return {"prompt": f"Put in order: {', '.join(words)}.", "answer": f"{', '.join(sorted(words))}."}


DOMAINS: dict[str, Callable[[random.Random], Row]] = {"past": past, "order": order}


def rows_of(domain: str) -> Iterator[Row]:
    """Endless, no prompt twice."""
    rng, seen = random.Random(f"{domain}/{SEED}"), set()
    while True:
        row = DOMAINS[domain](rng)
        if row["prompt"] not in seen:
            seen.add(row["prompt"])
            yield {**row, "data_source": domain}


def write(path: Path, rows: list[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{path}: {len(rows)} rows")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "data")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    sources = {domain: rows_of(domain) for domain in DOMAINS}
    splits = {
        split: [next(rows) for _ in range(size) for rows in sources.values()] for split, size in SIZES.items()
    }
    halves = {"teacher_weights": dict.fromkeys(DOMAINS, 1 / len(DOMAINS))}
    splits["mixture"] = [{**row, **halves} for row in splits["train"]]
    for split, lines in splits.items():
        write(options.out / f"{split}.jsonl", lines)
    for domain, rows in sources.items():
        write(options.out / f"{domain}-train.jsonl", [next(rows) for _ in range(TEACHER_ROWS)])


if __name__ == "__main__":
    main()
