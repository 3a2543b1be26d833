"""Makes the files of `understudy quickstart`: the problems, two expert teachers and one weak student.

    python recipes/quickstart/make_models.py [--out DIR] [--only data|student|teacher-add|teacher-sort]

Each teacher learns one domain by supervised training on right answers and never sees the other. The student
sees both, but so briefly that it mostly knows only the form of an answer. Steps and learning rates were
chosen on the `valid` problems; the `test` problems were used for no training and no choice, and are read
once, for the figures printed at the end.

One thread and fixed seeds: the same versions on the same kind of CPU write the same bytes. On other CPUs
rounding differs, and because skills appear suddenly in the student's few steps, its start may land a few
points off. That is why the weights are shipped instead of being made anew by every user.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from sft import SupervisedSchedule, accuracy, train
from task import Problem, Splits, interleave, make_splits
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from vocabulary import CONTEXT, build_tokenizer, save_tokenizer

ASSETS = Path(__file__).resolve().parents[2] / "src" / "understudy" / "assets" / "quickstart"
THREADS = 1

# Sorting is learned much sooner than addition; the student gets few rows of it so as to be weak in both.
SCHEDULES: dict[str, SupervisedSchedule] = {
    "student": SupervisedSchedule(steps=180, rows={"add": 112, "sort": 16}, seed=1),
    "teacher-add": SupervisedSchedule(steps=800, rows={"add": 128}, seed=2),
    "teacher-sort": SupervisedSchedule(steps=800, rows={"sort": 128}, seed=3),
}


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """A Qwen3 of 364k parameters: the real architecture, three layers deep."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=288,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=24,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return Qwen3ForCausalLM(config)


def save_model(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)


def save_problems(problems: list[Problem], path: Path) -> None:
    """One row per line, in the columns every Understudy dataset has."""
    rows = [
        {
            "messages": [{"role": "user", "content": problem.question}],
            "data_source": problem.domain,
            "answer": problem.answer,
        }
        for problem in problems
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_data(splits: dict[str, Splits], folder: Path) -> None:
    columns = {
        "train": [split.train for split in splits.values()],
        "valid": [split.valid for split in splits.values()],
        "test": [split.test for split in splits.values()],
    }
    for name, column in columns.items():
        problems = interleave(column, name)
        save_problems(problems, folder / f"{name}.jsonl")
        print(f"data/{name}.jsonl: {len(problems)} problems")


@dataclass(frozen=True)
class Grades:
    """Greedy accuracy per domain on problems no model was trained on."""

    valid: dict[str, float]
    test: dict[str, float]


def make_model(name: str, splits: dict[str, Splits], folder: Path) -> Grades:
    schedule = SCHEDULES[name]
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, schedule.seed)
    print(f"{name}: {model.num_parameters():,} parameters, {schedule.steps} steps of {schedule.rows}")
    train(model, tokenizer, {domain: split.sft for domain, split in splits.items()}, schedule)
    save_model(model, tokenizer, folder)
    return Grades(
        valid={domain: accuracy(model, tokenizer, split.valid) for domain, split in splits.items()},
        test={domain: accuracy(model, tokenizer, split.test) for domain, split in splits.items()},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ASSETS, help="folder that gets models/ and data/")
    parser.add_argument("--only", choices=["data", *SCHEDULES], help="make one part instead of all")
    arguments = parser.parse_args()

    torch.set_num_threads(THREADS)
    torch.use_deterministic_algorithms(True)
    splits = make_splits()
    if arguments.only in (None, "data"):
        make_data(splits, arguments.out / "data")
    names = [name for name in SCHEDULES if arguments.only in (None, name)]
    grades = {name: make_model(name, splits, arguments.out / "models" / name) for name in names}
    for name, grade in grades.items():
        for domain in splits:
            print(
                f"{name:13s} {domain:5s} valid {grade.valid[domain]:6.1%}  held-out test {grade.test[domain]:6.1%}"
            )


if __name__ == "__main__":
    main()
