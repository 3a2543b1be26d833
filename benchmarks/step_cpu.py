"""A whole sync step on a CPU beside TRL's DistillationTrainer, with the same weights and prompts.

    python benchmarks/step_cpu.py --trl-python /path/to/an/environment/with/trl/bin/python     about 6 minutes on two cores

    quickstart    the quickstart's student and its addition teacher (0.4 M and 1 M parameters), 128 prompts, 8 new tokens
    long          the same sizes with random weights, 32 prompts, up to 96 new tokens

Both systems get the same weights, prompts, batch, token budget and loss (forward KL). Each problem runs
twice: with one thread a process (rows `quickstart` and `long`: TRL has one process, we have two, trainer and
teacher) and with two (rows `…, two threads`). Threads are set by OMP_NUM_THREADS as well as in torch, which
on ARM uses a library with threads of its own for some products. No process is pinned: both systems have all
cores of the machine.

TRL takes the full vocabulary from a teacher in its own process; ours sends the best 8 of 44 tokens and the
mass of the rest from a teacher process. The systems run alternately, several rounds each, and the faster
half of each counts: other load on the machine can only slow a round down.

`--keep-rows` measures what `run.keep_rows` costs a step instead (`keep_rows_cost.py`).

`--against FOLDER` compares with another checkout of this project (its `src` folder) instead of TRL, with the
same environment, to measure what a change costs.

Results go to benchmarks/results/step_cpu-<hardware>-<date>.json, or to the folder named by `--out`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from dataclasses import replace
from importlib import resources
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hardware import cpu_name
from keep_rows_cost import cost
from step_problem import Shape, Timing, compare, has_trl, run_ours, run_trl, save

ASSETS = Path(str(resources.files("understudy.assets") / "quickstart"))
SHAPES = {
    "quickstart": Shape(
        "quickstart", 128, 8, 128, 8192, 8, 128, steps=12, skip=4, learning_rate=1e-3, threads=1
    ),
    "long": Shape("long", 32, 96, 32, 8192, 8, 128, steps=6, skip=2, threads=1),
}
THREADS = {1: "", 2: ", two threads"}
"""Threads of every process → suffix of the row names."""
GOAL = 1.5
_NO_LOSS = 0.95
"""The goal beside another checkout."""
TIMEOUT = 300.0


def main() -> None:
    options = _options()
    why_not = "" if options.against or options.keep_rows else has_trl(options.trl_python, vllm=False)
    peer = f"the checkout {options.against_name}" if options.against else "TRL 1.16 DistillationTrainer"
    rows = []
    with tempfile.TemporaryDirectory(prefix="understudy-step-") as name:
        wanted = [(SHAPES[shape], threads) for shape in options.shapes for threads in options.threads]
        for plain, threads in wanted:
            shape = replace(plain, name=plain.name + THREADS[threads], threads=threads)
            folder = Path(name) / f"{plain.name}-{threads}"
            folder.mkdir()
            student, teacher, prompts = _problem(plain, folder)
            ours: list[Timing | str] = []
            theirs: list[Timing | str] = []
            engine = {"max_batch": shape.batch}
            if options.keep_rows:
                rows += cost(shape, folder, student, teacher, prompts, engine, options.blocks)
                print(*(f"{row.name}: {row.value} {row.unit}" for row in rows[-8:]), sep="\n", flush=True)
                continue
            for turn in range(options.rounds):
                place = folder / str(turn)
                place.mkdir()
                ours.append(run_ours(shape, place, student, teacher, prompts, TIMEOUT, engine))
                if options.against:
                    other = {"PYTHONPATH": str(options.against.resolve())}
                    theirs.append(
                        run_ours(
                            shape, place, student, teacher, prompts, TIMEOUT, engine, None, "other", other
                        )
                    )
                else:
                    theirs.append(
                        why_not
                        or run_trl(
                            shape, place, student, teacher, prompts, TIMEOUT, options.trl_python, False
                        )
                    )
                print(
                    f"{shape.name}, round {turn + 1}: ours {_speed(ours[-1])}, {peer} {_speed(theirs[-1])}",
                    flush=True,
                )
            rows += compare(
                shape, _better(ours), _better(theirs), peer, _NO_LOSS if options.against else GOAL
            )
    if rows:
        # Under another name: the speed page shows the newest comparison with TRL.
        name = "keep_rows" if options.keep_rows else "step_cpu_against" if options.against else "step_cpu"
        save(name, cpu_name(), rows, options.out)


def _problem(shape: Shape, folder: Path) -> tuple[str, str, Path]:
    """Model folders and a prompt file with enough prompts for every step."""
    lines = (ASSETS / "data" / "train.jsonl").read_text().splitlines()
    prompts = [line for line in lines if json.loads(line)["data_source"] == "add"]
    needed = shape.batch * max(shape.steps, 64)  # a longer run begins another epoch
    path = folder / "prompts.jsonl"
    path.write_text("\n".join((prompts * (needed // len(prompts) + 1))[:needed]) + "\n")
    student, teacher = ASSETS / "models" / "student", ASSETS / "models" / "teacher-add"
    if shape.name == "long":
        student, teacher = (
            _random_twin(student, folder / "student", 1),
            _random_twin(teacher, folder / "teacher", 2),
        )
    return str(student), str(teacher), path


def _random_twin(model: Path, out: Path, seed: int) -> Path:
    """The same architecture and tokenizer with new random weights, which rarely end a sequence early."""
    shutil.copytree(model, out)
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).save_pretrained(out)
    return out


def _speed(timing: Timing | str) -> str:
    return timing if isinstance(timing, str) else f"{timing.tokens_per_second:,.0f} tokens/s"


def _better(timings: list[Timing | str]) -> Timing | str:
    """The fastest half of the rounds, merged."""
    good = sorted((t for t in timings if isinstance(t, Timing)), key=lambda t: -t.tokens_per_second)
    if not good:
        return next(t for t in timings if isinstance(t, str))
    best = good[: (len(good) + 1) // 2]
    seconds, tokens = [s for t in best for s in t.seconds], [n for t in best for n in t.tokens]
    return Timing(seconds, tokens, best[0].parts, best[0].cpu_seconds)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--trl-python", default=sys.executable, help="an interpreter that can import trl 1.16"
    )
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=list(SHAPES))
    parser.add_argument("--threads", nargs="+", type=int, choices=sorted(THREADS), default=list(THREADS))
    parser.add_argument("--against", type=Path, help="src folder of another checkout, instead of TRL")
    parser.add_argument("--against-name", default="before", help="the other checkout's name in the results")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--keep-rows", action="store_true", help="the cost of run.keep_rows, instead of TRL")
    parser.add_argument("--blocks", type=int, default=130, help="blocks of 2 steps, with --keep-rows")
    parser.add_argument("--out", type=Path, help="folder of the result file, for trials")
    return parser.parse_args()


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
