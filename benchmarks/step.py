"""A whole sync step on one GPU beside TRL's DistillationTrainer with vLLM colocated, in one run.

    python benchmarks/step.py                    about 4 minutes on an H200
    python benchmarks/step.py --quick            64 prompts, 128 new tokens
    python benchmarks/step.py --cpu              tiny shapes, to try the script itself
    python benchmarks/step.py --keep-rows        what run.keep_rows costs a step, instead of TRL
    python benchmarks/step.py --determinism      run.determinism = "full" beside "fast", instead of TRL

Random bf16 weights in Qwen3's shapes (0.6B student, 1.7B teacher), 256 prompts of 128 tokens, 512 new
tokens, forward KL: TRL over the full vocabulary, ours over the teacher's best 64 and the mass of the rest.
Each system runs in processes of its own and leaves the GPU before the next one starts. Ours runs first, and
every figure is printed as soon as it is known; a peer that cannot be imported, fails or runs out of time is
reported and left out.

Results go to benchmarks/results/step-<hardware>-<date>.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from hardware import cpu_name, gpu_name
from keep_rows_cost import cost
from step_problem import Row, Shape, Timing, compare, has_trl, run_ours, run_trl, save, show

VOCAB = 151_936
MODELS: dict[str, dict[str, int]] = {
    "student": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
    "teacher": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28},
}
TINY: dict[str, dict[str, int]] = {
    "student": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    "teacher": {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2},
}
PROMPT_TOKENS = 128
WHOLE = Shape("256 x 512", 256, 512, 32, 32_768, 64, 1024, "bfloat16", "cuda", steps=4, skip=1)
QUICK = replace(WHOLE, name="64 x 128", batch=64, new_tokens=128)
ON_CPU = Shape("tiny", 4, 8, 4, 4096, 8, 256, steps=3, skip=1)
GOAL = 1.5
DETERMINISM_GOAL = 1.3


def main() -> None:
    options = _options()
    started = time.monotonic()
    on_gpu = not options.cpu
    if on_gpu and not torch.cuda.is_available():
        sys.exit("no CUDA device; --cpu tries the script with tiny shapes")
    shape = ON_CPU if options.cpu else QUICK if options.quick else WHOLE
    shape = replace(shape, compile_student=not options.eager_student)
    hardware = gpu_name() if on_gpu else cpu_name()
    print(f"{hardware}, torch {torch.__version__}, shape {shape.name}", flush=True)
    with tempfile.TemporaryDirectory(prefix="understudy-step-") as name:
        folder = Path(name)
        student, teacher, prompts = problem(shape, folder, TINY if options.cpu else MODELS)
        print(f"models written after {time.monotonic() - started:.0f} s", flush=True)

        if options.keep_rows:
            rows = cost(shape, folder, student, teacher, prompts, json.loads(options.engine), options.blocks)
            print(*(f"{row.name}: {row.value} {row.unit}" for row in rows), sep="\n", flush=True)
            save("keep_rows", hardware, rows, options.out)
            return

        def left() -> float:
            return options.budget - (time.monotonic() - started)

        if options.determinism:
            rows = _determinism(replace(shape, steps=3), folder, (student, teacher, prompts), left)
            if rows:
                save("determinism", hardware, rows, options.out)
            return

        ours: Any = "left out"
        if "ours" in options.systems:
            engine = json.loads(options.engine)
            ours = run_ours(
                shape, folder, student, teacher, prompts, min(left(), options.budget * 0.5), engine
            )
            _say("ours", ours, folder / "ours.log")
        peer: Any = "left out"
        if "trl" in options.systems:
            use_vllm = on_gpu and not options.no_vllm
            peer = has_trl(options.trl_python, use_vllm)
            if not peer:
                peer = run_trl(shape, folder, student, teacher, prompts, left(), options.trl_python, use_vllm)
            _say("TRL", peer, folder / "trl.log")
        rows = compare(shape, ours, peer, "TRL 1.16 + vLLM colocated" if on_gpu else "TRL 1.16", GOAL)
    if rows and on_gpu:
        save("step-quick" if options.quick else "step", hardware, rows, options.out)
    print(f"done after {time.monotonic() - started:.0f} s")


def problem(shape: Shape, folder: Path, sizes: dict[str, dict[str, int]]) -> tuple[str, str, Path]:
    """Two model folders with random weights and one tokenizer of plain words, and prompts of exactly
    PROMPT_TOKENS tokens."""
    vocab = VOCAB if sizes is MODELS else 512
    words = {f"w{index}": index for index in range(vocab - 3)}
    words |= {"<pad>": vocab - 3, "<eos>": vocab - 2, "<unk>": vocab - 1}
    plain = Tokenizer(WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    for index, (role, size) in enumerate(sizes.items()):
        torch.manual_seed(index)
        config = Qwen3Config(
            vocab_size=vocab,
            num_attention_heads=16 if sizes is MODELS else 4,
            num_key_value_heads=8 if sizes is MODELS else 2,
            head_dim=128 if sizes is MODELS else 16,
            max_position_embeddings=shape.context,
            tie_word_embeddings=True,
            pad_token_id=vocab - 3,
            eos_token_id=vocab - 2,
            bos_token_id=None,
            **size,
        )
        with torch.device(shape.device):
            model = Qwen3ForCausalLM(config)
        model.to(getattr(torch, shape.dtype)).save_pretrained(folder / role)
        tokenizer.save_pretrained(folder / role)
        del model
    if shape.device == "cuda":
        torch.cuda.empty_cache()
    chance = random.Random(0)
    lines = []
    for _ in range(shape.batch * shape.steps):
        words_drawn = [f"w{chance.randrange(vocab - 3)}" for _ in range(PROMPT_TOKENS)]
        lines.append(json.dumps({"prompt": " ".join(words_drawn)}))
    prompts = folder / "prompts.jsonl"
    prompts.write_text("\n".join(lines) + "\n")
    return str(folder / "student"), str(folder / "teacher"), prompts


def _determinism(
    shape: Shape, folder: Path, given: tuple[str, str, Path], left: Callable[[], float]
) -> list[Row]:
    """Whole sync steps with results that repeat to the bit beside fast ones."""
    found: dict[str, Timing] = {}
    rows: list[Row] = []
    for level in ("fast", "full"):
        name, seconds = f"determinism-{level}", left() * (0.5 if level == "fast" else 1.0)
        timing = run_ours(shape, folder, *given, seconds, {}, name=name, run_keys={"determinism": level})
        _say(f"determinism = {level}", timing, folder / f"{name}.log")
        if isinstance(timing, str):
            continue
        found[level] = timing
        row = Row(f"{shape.name}: sync step, determinism = {level}", round(median(timing.seconds), 4), "s")
        if level == "full" and "fast" in found:
            row.peer, row.peer_value = "fast, same run", round(median(found["fast"].seconds), 4)
            row.ratio = round(row.value / row.peer_value, 3)
            row.goal, row.met = f"<= {DETERMINISM_GOAL} x", row.ratio <= DETERMINISM_GOAL
        rows.append(row)
        rows += [
            Row(f"{shape.name}: determinism = {level}, {part}", round(value, 4), "s of a step")
            for part, value in timing.parts.items()
        ]
        print(*map(show, rows), sep="\n", flush=True)
    return rows


def _say(name: str, timing: Any, log: Path) -> None:
    """Prints a system's figures at once, or the end of its log if it gave none."""
    if isinstance(timing, str):
        tail = log.read_text(errors="replace").splitlines()[-15:] if log.exists() else []
        print(f"{name}: {timing}", *tail, sep="\n  ", flush=True)
    else:
        steps = ", ".join(f"{seconds:.2f}" for seconds in timing.seconds)
        print(f"{name}: {timing.tokens_per_second:,.0f} completion tokens/s (steps of {steps} s)", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a smaller batch and shorter answers")
    parser.add_argument("--cpu", action="store_true", help="tiny shapes without a GPU, to try the script")
    parser.add_argument("--systems", nargs="+", choices=["ours", "trl"], default=["ours", "trl"])
    parser.add_argument(
        "--trl-python",
        default=os.environ.get("UNDERSTUDY_VLLM_PYTHON", sys.executable),
        help="an interpreter that can import trl and vllm",
    )
    parser.add_argument("--no-vllm", action="store_true", help="let TRL generate with transformers")
    parser.add_argument("--eager-student", action="store_true", help="the student's layers not compiled")
    parser.add_argument("--engine", default="{}", help='more keys of [rollout], as JSON: {"engine": "vllm"}')
    parser.add_argument("--budget", type=float, default=285.0, help="seconds for everything")
    parser.add_argument("--keep-rows", action="store_true")
    parser.add_argument("--determinism", action="store_true")
    parser.add_argument("--blocks", type=int, default=64, help="blocks of 2 steps, with --keep-rows")
    parser.add_argument("--out", type=Path, help="folder of the result file")
    return parser.parse_args()


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
