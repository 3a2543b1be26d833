"""Makes the calculator recipe's files: problems, a teacher that uses the tool, a student that does not.

    python recipes/calculator/make_models.py [--out DIR] [--only data|teacher|student]

The teacher is trained on whole conversations by supervised training. The student is the teacher after
further training on answers alone: it writes a number directly, never calls the tool, and is nearly always
wrong. Steps were chosen on the `valid` problems; the `test` problems are read once, for the figures printed
at the end. Accuracy is that of greedy answers through the real tool loop.

One thread and fixed seeds: the same versions on the same kind of CPU write the same bytes.
"""

import argparse
import asyncio
import json
import random
from pathlib import Path

import torch
from chat import CONTEXT, build_tokenizer, save_tokenizer
from problems import Problem, Splits, Turn, conversation, from_the_head, make_splits
from supervise import encode
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from understudy.policy.supervised import SupervisedSchedule, train
from understudy.run.evaluate_model import evaluate_model

HERE = Path(__file__).resolve().parent
REWARD = "understudy.rollout.rewards.builtin:exact_match"

SCHEDULES: dict[str, SupervisedSchedule] = {
    "teacher": SupervisedSchedule(steps=500, rows={"plain": 48, "mistaken": 8}, seed=2),
    "student": SupervisedSchedule(
        steps=30, rows={"from_the_head": 64}, seed=1, learning_rate=5e-4, warmup_steps=7
    ),
}


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """A Qwen3 of 290k parameters: the real architecture, three layers deep."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=192,
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


def make_data(splits: Splits, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("train", "valid", "test"):
        problems: list[Problem] = getattr(splits, name)
        rows = [
            {
                "messages": [{"role": "user", "content": problem.question}],
                "data_source": "calculator",
                "answer": problem.answer,
            }
            for problem in problems
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"data/{name}.jsonl: {len(rows)} problems")


def conversations(kind: str, splits: Splits) -> list[list[Turn]]:
    if kind == "from_the_head":
        return [from_the_head(problem) for problem in splits.train]
    if kind == "mistaken":
        rng = random.Random("mistakes")
        return [conversation(problem, rng) for problem in splits.train]
    return [conversation(problem) for problem in splits.sft]


def make_model(name: str, splits: Splits, models: Path) -> None:
    schedule, tokenizer = SCHEDULES[name], build_tokenizer()
    if name == "student":
        model = Qwen3ForCausalLM.from_pretrained(models / "teacher")
    else:
        model = build_model(tokenizer, schedule.seed)
    print(f"{name}: {model.num_parameters():,} parameters, {schedule.steps} steps of {schedule.rows}")
    train(model, {kind: encode(tokenizer, conversations(kind, splits)) for kind in schedule.rows}, schedule)
    save_model(model, tokenizer, models / name)


def grade(model: Path, data: Path, split: str) -> float:
    """Accuracy through the tool loop, as the trainer evaluates."""
    result = asyncio.run(evaluate_model(str(model), data / f"{split}.jsonl", REWARD, 48, None, agent="tool"))
    return result["accuracy"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=HERE, help="folder that gets models/ and data/")
    parser.add_argument("--only", choices=["data", *SCHEDULES], help="make one part instead of all")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    splits, data = make_splits(), arguments.out / "data"
    if arguments.only in (None, "data"):
        make_data(splits, data)
    names = [name for name in SCHEDULES if arguments.only in (None, name)]
    for name in names:
        make_model(name, splits, arguments.out / "models")
    for name in names:
        marks = {split: grade(arguments.out / "models" / name, data, split) for split in ("valid", "test")}
        print(f"{name:8s} valid {marks['valid']:6.1%}  held-out test {marks['test']:6.1%}")


if __name__ == "__main__":
    main()
