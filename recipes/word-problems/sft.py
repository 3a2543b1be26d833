"""Supervised fine-tuning of the student on the prompts of the other methods: the baseline.

    python recipes/word-problems/sft.py --answers worked                  the dataset's own worked answers
    python recipes/word-problems/sft.py --answers teacher                 the teacher's greedy answers, right or wrong

The run folder gets weights every `--save-every` steps (`step-000020.safetensors`, as in a checkpoint) and
metrics.jsonl with the seconds of each step. `teacher` answers are written once to `--written` and read from
there after that; metrics.jsonl has the time it took to write them.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from grading import Grader, read_prompts
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from understudy.policy.checkpoints.state import storable
from understudy.policy.supervised import SupervisedSchedule, encode_chats, train
from understudy.rollout.render import answer_end, turn_end
from understudy.trainers.models import stop_ids

HERE = Path(__file__).resolve().parent


def write_answers(
    teacher: Path, data: Path, count: int | None, out: Path, new_tokens: int, context: int
) -> None:
    """One greedy answer of the teacher per prompt."""
    started = time.monotonic()
    grader = Grader(teacher, new_tokens, context)
    prompts = read_prompts(data, count)
    ready = time.monotonic()
    texts = [grader.decode(answer.tokens[answer.loss_mask]) for answer in grader.answers(prompts)]
    cost = {"answers": len(texts), "seconds": time.monotonic() - ready, "start_seconds": ready - started}
    grader.close()
    out.parent.mkdir(parents=True, exist_ok=True)
    rows = (
        {"messages": list(prompt.messages), "answer": text}
        for prompt, text in zip(prompts, texts, strict=True)
    )
    out.with_suffix(".cost.json").write_text(json.dumps(cost) + "\n")
    out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def sft(options: argparse.Namespace) -> None:
    """Constant learning rate after the warm-up, as the other methods have it; weights in float32, arithmetic
    in bfloat16."""
    source = options.written if options.answers == "teacher" else options.data
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(options.student)
    model = AutoModelForCausalLM.from_pretrained(options.student, dtype=torch.float32)
    end = answer_end(tokenizer, stop_ids(model, tokenizer), turn_end(tokenizer))
    examples = encode_chats(tokenizer, [(row["messages"], row["answer"]) for row in rows], end)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    options.out.mkdir(parents=True, exist_ok=True)
    last = time.monotonic()

    def after_step(step: int) -> bool:
        nonlocal last
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        line = {"step": step, "time/step": time.monotonic() - last, "actor/lr": schedule.rate(step - 1)}
        with (options.out / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        if step % options.save_every == 0 or step == options.steps:
            save_weights(model, options.out / f"step-{step:06d}.safetensors")
        last = time.monotonic()
        return True

    schedule = SupervisedSchedule(
        options.steps,
        {"train": options.batch},
        seed=options.seed,
        learning_rate=options.learning_rate,
        weight_decay=0.0,
        warmup_steps=5,
        decay="none",
    )
    train(model, {"train": examples}, schedule, after_step, options.rows_at_once)


def save_weights(model: Any, path: Path) -> None:
    """Written under another name until it is complete: the grader may be waiting for the file."""
    weights = {name: tensor.to(torch.bfloat16).cpu() for name, tensor in model.named_parameters()}
    save_file(storable(weights), path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--answers", choices=["worked", "teacher"], default="worked")
    parser.add_argument("--data", type=Path, default=HERE / "data" / "train.jsonl")
    parser.add_argument("--student", type=Path, default=HERE / "models" / "student")
    parser.add_argument("--teacher", type=Path, default=HERE / "models" / "teacher")
    parser.add_argument("--written", type=Path, default=HERE / "data" / "train-teacher.jsonl")
    parser.add_argument("--out", type=Path, default=Path("runs/sft"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rows-at-once", type=int, default=32, help="of one forward and backward")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--count", type=int, help="prompts the teacher answers; all when not set")
    parser.add_argument("--max-new-tokens", type=int, default=192)
    parser.add_argument("--context", type=int, default=384)
    parser.add_argument("--write-only", action="store_true", help="write the teacher's answers and stop")
    options = parser.parse_args()
    if options.answers == "teacher" and not options.written.exists():
        write_answers(
            options.teacher,
            options.data,
            options.count,
            options.written,
            options.max_new_tokens,
            options.context,
        )
    if not options.write_only:
        sft(options)


if __name__ == "__main__":
    main()
