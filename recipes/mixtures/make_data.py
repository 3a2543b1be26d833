"""Makes the training rows of this recipe: the quickstart's, each with the weights of both teachers.

    python recipes/mixtures/make_data.py [--out DIR]

Seconds.
"""

import argparse
import json
from pathlib import Path

ROWS = (
    Path(__file__).resolve().parents[2]
    / "src"
    / "understudy"
    / "assets"
    / "quickstart"
    / "data"
    / "train.jsonl"
)
DOMAINS = ("add", "sort")
OWN = 0.75
"""The weight of the teacher that knows a row's domain; the other teacher has the rest."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "data")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with (arguments.out / "train.jsonl").open("w", encoding="utf-8") as out:
        for line in ROWS.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            weights = {name: OWN if name == row["data_source"] else 1 - OWN for name in DOMAINS}
            out.write(json.dumps({**row, "teacher_weights": weights}) + "\n")


if __name__ == "__main__":
    main()
