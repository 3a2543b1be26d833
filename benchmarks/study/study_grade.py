"""Grades weights as they appear: KL to the teacher for every run, accuracy for runs without their own.

    python benchmarks/study/study_grade.py RECIPE key=value … --kept DIR --out grades.jsonl

Student, teachers, held-out problems and reward are those of the recipe.

Runs in parallel to the study until the file `done` is in DIR and nothing is left to grade. Each weights file
is removed after grading.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes" / "word-problems"))
from grading import Grader, read_prompts

from understudy.config import load_recipe

_LOOK_SECONDS = 0.2


def _context(model: Path) -> int:
    return int(json.loads((model / "config.json").read_text())["max_position_embeddings"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("recipe", type=Path, help="of a method that has the teachers")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--kept", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kl-samples", type=int, default=128)
    options = parser.parse_args()
    recipe = load_recipe(options.recipe, options.overrides)
    assert recipe.data.eval is not None and recipe.data.reward is not None
    new_tokens = recipe.rollout.max_new_tokens
    context = recipe.rollout.context_length or _context(Path(recipe.student.model))
    grader = Grader(Path(recipe.student.model), new_tokens, context, 128, recipe.data.reward)
    teachers = {
        teacher.key or "": AutoModelForCausalLM.from_pretrained(teacher.model, dtype=grader.model.dtype)
        .to(grader.device)
        .eval()
        for teacher in recipe.teachers.values()
    }
    prompts = read_prompts(Path(recipe.data.eval[0]), recipe.trainer.eval_samples)
    near = prompts[: options.kl_samples]

    def grade(name: str, step: int, accuracy: bool) -> None:
        started = time.monotonic()
        line = {"run": name, "step": step, "kl": grader.distance(teachers, near)}
        line |= {f"val/{key}": value for key, value in grader.accuracy(prompts).items()} if accuracy else {}
        with options.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{name} step {step}: {line}, {time.monotonic() - started:.1f} s", flush=True)

    grade("start", 0, accuracy=True)
    while True:
        finished = (options.kept / "done").exists()
        waiting = sorted(options.kept.glob("*/step-*.safetensors"), key=lambda path: path.stat().st_mtime)
        for path in waiting:
            with torch.no_grad():
                grader.take(load_file(path))
            grade(path.parent.name, int(path.stem.removeprefix("step-")), path.parent.name.startswith("sft-"))
            path.unlink()
        if finished and not waiting:
            break
        time.sleep(_LOOK_SECONDS)
    grader.close()


if __name__ == "__main__":
    main()
