"""Converts a copy of GSM8K into the columns of an Understudy dataset.

    python recipes/gsm8k/prepare.py TRAIN.jsonl TEST.jsonl [--out DIR] [--instruction TEXT]

Rows of the original have `question` and `answer` (worked steps that end in `#### number`). `train.jsonl` and
`make.jsonl` are both the training problems less the last 473, which become `valid.jsonl`: 7,473 problems are
too few for a separate set to make the models with. The calculator's annotations (`<<2*3=6>>`) are left out
of the answers. `--instruction` is appended to every question: a chat model answers in the form it asks for.
"""

import argparse
import json
import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
VALID = 473
_ANNOTATION = re.compile(r"<<[^>]*>>")


def rows_of(path: Path, instruction: str = "") -> list[dict[str, object]]:
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        row = json.loads(line)
        if not {"question", "answer"} <= row.keys():
            raise SystemExit(f"{path}, line {number}: has {sorted(row)}; expected `question` and `answer`")
        chat = [{"role": "user", "content": row["question"] + (f"\n{instruction}" if instruction else "")}]
        answer = _ANNOTATION.sub("", row["answer"])
        rows.append({"messages": chat, "data_source": "gsm8k", "answer": answer})
    return rows


def prepare(train: Path, test: Path, out: Path, valid: int = VALID, instruction: str = "") -> dict[str, int]:
    """Writes the four files; returns how many rows each has."""
    known = rows_of(train, instruction)
    valid = min(valid, len(known) // 2)
    splits = {
        "train": known[:-valid],
        "make": known[:-valid],
        "valid": known[-valid:],
        "test": rows_of(test, instruction),
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in splits.items():
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {name: len(rows) for name, rows in splits.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("train", type=Path)
    parser.add_argument("test", type=Path)
    parser.add_argument("--out", type=Path, default=HERE / "data")
    parser.add_argument("--instruction", default="")
    options = parser.parse_args()
    found = prepare(options.train, options.test, options.out, instruction=options.instruction)
    for name, count in found.items():
        print(f"{name}.jsonl: {count} problems")


if __name__ == "__main__":
    main()
