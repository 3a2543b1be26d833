"""What a student has learnt from a teacher with another tokenizer, by the text that it writes and nothing else.

    python benchmarks/teachers/real_pair.py write --teacher FOLDER --openings train.jsonl --out written.jsonl
    python benchmarks/teachers/real_pair.py measure --teacher FOLDER --openings test.jsonl --models before=FOLDER after=FOLDER …

`write`: rows with the teacher's own continuations as `answer`, for supervised fine-tuning. `measure`: every model, the teacher too,
continues the openings. All figures come from plain transformers forwards, each model reading the text in its own tokens:

| figure | is |
|---|---|
| bits for the teacher | −log2 of the teacher's probability of the continuations, per byte |
| bits for itself | the same of the model that wrote them: an estimate of its entropy. It falls if the model repeats itself |
| divergence | their difference: an estimate of the reverse KL of the texts, in bits per byte. Each side counts one tokenization of a text |
| bits of the teacher's texts | −log2 of the model's probability of the teacher's continuations, per byte |
| repeated, distinct | share of words that end a triple of words seen before in the same continuation; different pairs of words in all continuations, as a share of the pairs |
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from hardware import cpu_name
from step_problem import Row, save


@dataclass(frozen=True)
class Text:
    opening: str
    continuation: str
    bits: float
    """−log2 of the probability with which its writer drew its tokens."""


class Model:
    def __init__(self, folder: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.special = set(self.tokenizer.all_special_ids)

    @torch.no_grad()
    def write(self, openings: Sequence[str], tokens: int, seed: int) -> list[Text]:
        torch.manual_seed(seed)
        found = []
        for start in range(0, len(openings), 32):
            batch = openings[start : start + 32]
            given = self.tokenizer(batch, return_tensors="pt", padding=True)
            width = given["input_ids"].shape[1]
            rows = self.model.generate(
                input_ids=given["input_ids"],
                attention_mask=given["attention_mask"],
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=tokens,
            )
            for opening, row in zip(batch, rows, strict=True):
                written = row[width:].tolist()
                ends = [place for place, one in enumerate(written) if one in self.special]
                written = written[: ends[0]] if ends else written
                before = self.tokenizer(opening)["input_ids"]
                text = self.tokenizer.decode([*before, *written], skip_special_tokens=True)
                found.append(
                    Text(opening, text[len(opening) :], self._bits([*before, *written], len(before)))
                )
        return found

    @torch.no_grad()
    def _bits(self, ids: list[int], first: int) -> float:
        """Of the tokens from `first` on."""
        logits = self.model(torch.tensor([ids])).logits[0, first - 1 : -1]
        drawn = torch.tensor(ids[first:])
        return float(torch.nn.functional.cross_entropy(logits, drawn, reduction="sum")) / math.log(2)

    def bits(self, text: Text) -> float:
        """Of a continuation that any model wrote, in this model's tokens."""
        whole = self.tokenizer(text.opening + text.continuation, return_offsets_mapping=True)
        first = next(i for i, (_, end) in enumerate(whole["offset_mapping"]) if end > len(text.opening))
        return self._bits(whole["input_ids"], first)


def size(texts: Sequence[Text]) -> int:
    return sum(len(text.continuation.encode()) for text in texts)


def repeated(texts: Sequence[Text]) -> float:
    again = total = 0
    for text in texts:
        words = text.continuation.lower().split()
        triples = list(zip(words, words[1:], words[2:], strict=False))
        again, total = again + len(triples) - len(set(triples)), total + len(triples)
    return again / max(1, total)


def distinct(texts: Sequence[Text]) -> float:
    pairs = [pair for text in texts for pair in pairwise(text.continuation.lower().split())]
    return len(set(pairs)) / max(1, len(pairs))


def measured(
    name: str, model: Model, teacher: Model, teacher_texts: Sequence[Text], options: Any
) -> list[Row]:
    """`teacher_texts`: the teacher's own continuations."""
    mine = model is teacher
    texts = list(teacher_texts) if mine else model.write(options.texts, options.tokens, options.seed)
    texts = [text for text in texts if text.continuation]
    for text in texts[: options.show]:
        print(f"  {name}: {text.opening} |{text.continuation!r}", flush=True)
    count = size(texts)
    theirs = [text.bits if mine else teacher.bits(text) for text in texts]
    apart = [
        (bits - text.bits) / len(text.continuation.encode()) for bits, text in zip(theirs, texts, strict=True)
    ]
    own = sum(text.bits for text in texts)
    bits_of_teacher_texts = sum(model.bits(text) for text in teacher_texts) / size(teacher_texts)
    figures = {
        "bits for the teacher": (sum(theirs) / count, "bits/byte"),
        "bits for itself": (own / count, "bits/byte"),
        "divergence": ((sum(theirs) - own) / count, "bits/byte"),
        "divergence, standard error": (stdev(apart) / math.sqrt(len(apart)), "bits/byte"),
        "bits of the teacher's texts": (bits_of_teacher_texts, "bits/byte"),
        "repeated": (repeated(texts), "share"),
        "distinct": (distinct(texts), "share"),
        "bytes of a continuation": (count / len(texts), "bytes"),
    }
    return [Row(f"{name}: {key}", round(value, 4), unit) for key, (value, unit) in figures.items()]


def reported(name: str, run: Path) -> list[Row]:
    """What the run itself said: the means of its first and of its last three steps."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    keys = [key for key in lines[-1] if key.startswith("teacher/") or key in SHOWN]
    steps = [line for line in lines if "actor/loss" in line]
    ends = {"first": steps[:3], "last": steps[-3:]}
    return [
        Row(f"{name}: {key}, {end} 3 steps", round(mean(line[key] for line in part), 4), "")
        for key in keys
        for end, part in ends.items()
        if all(key in line for line in part)
    ]


SHOWN = (
    "actor/loss",
    "actor/entropy",
    "actor/distillation/k1",
    "actor/distillation/teacher_mass",
    "actor/grad_norm",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["write", "measure"])
    parser.add_argument(
        "--models", nargs="*", default=[], help="NAME=FOLDER of students, NAME=RUN for what a run reported"
    )
    parser.add_argument("--teacher", required=True)
    parser.add_argument("--openings", type=Path, required=True)
    parser.add_argument("--count", type=int, default=64, help="openings at most")
    parser.add_argument("--tokens", type=int, default=32, help="of a continuation")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--show", type=int, default=4, help="continuations of each model that are printed")
    parser.add_argument("--out", type=Path, help="write: a file; measure: the folder of the result file")
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.openings.read_text().splitlines()]
    options.texts = [row["prompt"] for row in rows][: options.count]
    teacher = Model(options.teacher)
    teacher_texts = [
        text for text in teacher.write(options.texts, options.tokens, options.seed) if text.continuation
    ]
    if options.what == "write":
        lines = [{"prompt": one.opening, "answer": one.continuation.lstrip(" ")} for one in teacher_texts]
        options.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return
    found = measured("teacher", teacher, teacher, teacher_texts, options)
    for name, folder in (one.split("=", 1) for one in options.models):
        if (Path(folder) / "metrics.jsonl").exists():
            found += reported(name, Path(folder))
        else:
            found += measured(name, Model(folder), teacher, teacher_texts, options)
    for row in found:
        print(f"{row.name:<60} {row.value} {row.unit}")
    save("real_pair", cpu_name(), found, options.out)


if __name__ == "__main__":
    main()
