"""How the tokens of two models line up on the same texts: what `vocabulary = "align"` has to work with.

    python benchmarks/teachers/token_pairs.py TEXT.jsonl MODEL MODEL …

TEXT.jsonl: rows with `answer`, whose text stands for a completion. For every ordered pair of folders, the first is the
student: the share of its tokens aligned one to one, in chains, and left out, and the share of the teacher's
tokens that the student has too. The bytes of both sides are compared at every bound.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import permutations
from pathlib import Path

import numpy as np

from understudy.teacher.alignment import Alignment, TokenAligner, TurnEnds
from understudy.teacher.token_bytes import TokenBytes

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from hardware import cpu_name
from step_problem import Row, save


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--out", type=Path, help="folder of the result file")
    options = parser.parse_args()
    texts = [json.loads(line)["answer"] for line in options.text.read_text().splitlines()[: options.rows]]
    models = {folder.name: TokenBytes.load(folder, folder.name) for folder in options.models}
    rows: list[Row] = []
    for student, teacher in permutations(models, 2):
        rows += compared(f"{student} under {teacher}", models[student], models[teacher], texts)
    for row in rows:
        print(f"{row.name:<70} {row.value} {row.unit}")
    save("token_pairs", cpu_name(), rows, options.out)


def compared(name: str, student: TokenBytes, teacher: TokenBytes, texts: list[str]) -> list[Row]:
    ends = TurnEnds((), min(student.special), min(teacher.special))
    aligner = TokenAligner(student, teacher, ends)
    counts = np.zeros(3, np.int64)
    for text in texts:
        completion = np.array(student.encode(text), np.int32)
        found = aligner.align(completion)
        check(student, teacher, completion, found)
        counts += found.counts
    one, chains, left = counts / counts.sum()
    return [
        Row(f"{name}: tokens aligned one to one", round(float(one), 4), f"of {counts.sum()}"),
        Row(f"{name}: tokens in chains", round(float(chains), 4), f"of {counts.sum()}"),
        Row(
            f"{name}: tokens left out",
            round(float(left), 4),
            f"of {counts.sum()}",
            goal="0",
            met=bool(left == 0),
        ),
        Row(
            f"{name}: teacher's tokens that the student has",
            round(aligner.shared / len(teacher.pieces), 4),
            f"of {len(teacher.pieces)}",
        ),
    ]


def check(student: TokenBytes, teacher: TokenBytes, completion: np.ndarray, found: Alignment) -> None:
    """Both sides have read the same bytes at every bound."""
    lengths = [
        np.concatenate([[0], np.cumsum([len(piece) for piece in side.bytes_of(ids.tolist())])])
        for side, ids in ((student, completion), (teacher, found.tokens))
    ]
    if not (lengths[0][found.bounds[:, 0]] == lengths[1][found.bounds[:, 1]]).all():
        raise SystemExit(f"bounds at different bytes: {completion.tolist()}")


if __name__ == "__main__":
    main()
