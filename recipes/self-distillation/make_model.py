"""Makes the student of this recipe: the quickstart's, taught to use an answer that stands before the question.

    python recipes/self-distillation/make_model.py [--out DIR]

    "551=54+86="  ->  "551"     an answer before the question is given again, right or wrong
    "54+86="      ->  ?         without: as weak as the quickstart's student

The answers before the questions are those of other problems, so nothing is learnt about the problems themselves. About
two minutes on one CPU core. The held-out problems are read once, for the figures printed at the end.
"""

import argparse
import random
import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen3ForCausalLM

sys.path.append(str(Path(__file__).resolve().parents[1] / "quickstart"))
from make_models import ASSETS, save_model
from sft import SupervisedSchedule, accuracy, train
from task import Problem, make_splits

SCHEDULE = SupervisedSchedule(steps=150, rows={"add": 64, "sort": 64}, seed=4, learning_rate=1e-3)


def hinted(problem: Problem, answer: str) -> Problem:
    return Problem(problem.domain, f"{answer}={problem.question}", answer, problem.family)


def with_answers_of_others(problems: list[Problem]) -> list[Problem]:
    others = [one.answer for one in problems]
    random.Random(0).shuffle(others)
    return [hinted(one, answer) for one, answer in zip(problems, others, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "models" / "student")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    start = ASSETS / "models" / "student"
    tokenizer, model = AutoTokenizer.from_pretrained(start), Qwen3ForCausalLM.from_pretrained(start)
    splits = make_splits()
    problems = {name: with_answers_of_others(split.sft) for name, split in splits.items()}
    train(model, tokenizer, problems, SCHEDULE)
    save_model(model, tokenizer, arguments.out)
    model.eval()
    for name, split in splits.items():
        with_answer = accuracy(model, tokenizer, [hinted(one, one.answer) for one in split.test])
        print(
            f"{name}: {accuracy(model, tokenizer, split.test):.1%}, with the answer before it {with_answer:.1%}"
        )


if __name__ == "__main__":
    main()
