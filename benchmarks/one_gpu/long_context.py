"""Rows of 32,000 tokens on one GPU: does what `plan` recommends run, how much memory does it take, and how fast is it?

    python benchmarks/one_gpu/long_context.py TEACHER STUDENT TEXT.jsonl            about 130 s on an H200
    python benchmarks/one_gpu/long_context.py TEACHER STUDENT TEXT.jsonl --rows 2 --length 512 --new 32 --short 64   to try it

Prompts are problems of TEXT.jsonl (`question` or `prompt`, with the `answer`) one after another, up to --length − --new
tokens. The settings are the recipe's defaults, changed only where `planning.memory.advice` says so. The short case trains the
same number of tokens per step in rows of --short tokens, with the same share of new ones.

Peaks: of the trainer by its metric `perf/memory/cuda_peak_gb`, of a replica by scoring rows of that length in a process
of its own. Both are torch's allocations; `plan` adds a constant for the process, which is taken off here. AdamW's moments
exist from the end of the first step on, so the trainer's peak is judged only if it took a second one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from understudy.config import Recipe, parse_recipe
from understudy.planning.memory.advice import settings_that_fit
from understudy.planning.processes import PROCESS_BYTES, plan_processes
from understudy.planning.seating import seat
from understudy.teacher.protocol import request_of
from understudy.teacher.scoring.model import load_frozen
from understudy.teacher.scoring.scorer import Scorer, ScorerOptions
from understudy.teacher.scoring.warm_up import warm_up
from understudy.types.scores import ScoreItem, Signal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from hardware import cpu_name, gpu_name
from step_problem import Row, killed_at_the_end, save, show, toml

WITHIN = 0.05
TOPK = 32


def main() -> None:
    options = _options()
    if options.replica:
        _replica_peak(options)
        return
    on_gpu = torch.cuda.is_available()
    hardware = gpu_name() if on_gpu else cpu_name()
    gpu_bytes = torch.cuda.get_device_properties(0).total_memory if on_gpu else 80 << 30
    rows: list[Row] = []
    rates: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="understudy-long-") as name:
        folder = Path(name)
        short = options.length // options.short
        cases = {
            f"rows of {options.length}": (options.rows, options.length, options.new),
            f"rows of {options.short}": (options.rows * short, options.short, max(1, options.new // short)),
        }
        for case, (count, length, new) in cases.items():
            label = f"{options.label}, {case} tokens"
            run = folder / case.replace(" ", "-")
            recipe = _recipe(options, folder, run, count, length, new)
            changed = settings_that_fit(parse_recipe(recipe), gpu_bytes)
            print(f"{label}: plan changes {changed or 'nothing'}", flush=True)
            for key, value in changed.items():
                section, _, field = key.partition(".")
                recipe[section] = {**recipe[section], field: value}
            lines = _train(recipe, run, options)
            if not lines:
                rows.append(Row(f"{label}: trained, scored, generated", 0.0, "steps", goal=">= 1", met=False))
                save("long_context", hardware, rows, options.out)
                continue
            parsed = parse_recipe(recipe)
            rows += _rows(label, lines, count, length - new, rates)
            if on_gpu:
                peak_gb = max(line["perf/memory/cuda_peak_gb"] for line in lines)
                rows.append(_within(f"{label}: trainer, peak", _planned(parsed, "trainer"), peak_gb * 1e9))
                if len(lines) < 2:
                    rows[-1].name, rows[-1].met = f"{label}: trainer, peak of the first step", None
                if peak := _measured_replica(options, length, new):
                    rows.append(
                        _within(
                            f"{label}: teacher replica, peak", _planned(parsed, "teacher-teacher-0"), peak
                        )
                    )
            print(*map(show, rows), sep="\n", flush=True)
            save("long_context", hardware, rows, options.out)


def _rows(
    label: str, lines: list[dict[str, Any]], count: int, prompt: int, rates: dict[str, float]
) -> list[Row]:
    rows = [Row(f"{label}: trained, scored, generated", float(len(lines)), "steps", goal=">= 1", met=True)]
    counted = lines[1:] or lines  # the first step compiles and records
    seconds = median(line["time/step"] for line in counted)
    written = median(line["response_length/mean"] for line in counted)
    tokens = count * (prompt + written)
    row = Row(f"{label}: sync step", round(tokens / seconds, 1), "tokens/s")
    if rates:
        row.peer, row.peer_value = next(iter(rates)), round(next(iter(rates.values())), 1)
        row.ratio = round(tokens / seconds / next(iter(rates.values())), 3)
    rates[label] = tokens / seconds
    rows += [row, Row(f"{label}: step", round(seconds, 3), "s")]
    rows += [
        Row(f"{label}: {part}", round(median(line[f"time/{part}"] for line in counted), 3), "s of a step")
        for part in ("produce", "update")
    ]
    rows.append(Row(f"{label}: new tokens of a row", round(written, 1), "tokens"))
    return rows


def _within(name: str, planned: int, measured: float) -> Row:
    ratio = round(planned / measured, 3)
    return Row(
        name, round(measured / 2**30, 2), "GiB", "plan", round(planned / 2**30, 2), ratio,
        f"plan within {WITHIN:.0%}", abs(ratio - 1) <= WITHIN,
    )  # fmt: skip


def _planned(recipe: Recipe, name: str) -> int:
    process = next(one for one in plan_processes(recipe, seat(recipe, 1)) if one.name == name)
    assert process.bytes is not None
    return process.bytes + process.working_bytes - PROCESS_BYTES


def _recipe(
    options: argparse.Namespace, folder: Path, run: Path, count: int, length: int, new: int
) -> dict[str, Any]:
    """Defaults, but for what makes rows long: lengths, the number of rows, half precision."""
    prompts = folder / f"prompts-{length}.jsonl"
    _write_prompts(options, prompts, count * options.steps, length - new)
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    compiled = {"compile": True} if options.compile else {}
    return {
        "student": {"model": options.student, "dtype": dtype, **compiled},
        "teachers": {"teacher": {"model": options.teacher, "dtype": dtype, **compiled}},
        "loss": {"kind": "forward_kl", "signal": "topk", "topk": TOPK},
        "rollout": {"max_new_tokens": new, "context_length": length},
        "data": {"train": str(prompts), "shuffle": False},
        "trainer": {"steps": options.steps, "batch_size": count, "checkpoint_every": 10_000},
        "run": {"dir": str(run)},
    }


def _write_prompts(options: argparse.Namespace, path: Path, count: int, tokens: int) -> None:
    """Plain prompts of at most `tokens` tokens each, as long as whole words allow."""
    tokenizer = AutoTokenizer.from_pretrained(options.student)
    found = [json.loads(line) for line in options.text.read_text().splitlines()]
    texts = [
        f"{_text(one.get('question') or one.get('prompt') or one['messages'])}\n{one.get('answer', '')}\n\n"
        for one in found
    ]
    ids = tokenizer("".join(texts), add_special_tokens=False)["input_ids"]
    room = tokens - 8  # a text cut between two tokens may be tokenized into some more
    ids = ids * (-(-room * 2 // len(ids)) + 1)
    starts = [index * 997 % (len(ids) - room) for index in range(count)]
    lines = [
        json.dumps({"prompt": f"{index}: " + tokenizer.decode(ids[start : start + room - 8])})
        for index, start in enumerate(starts)
    ]
    path.write_text("\n".join(lines) + "\n")


def _text(prompt: Any) -> str:
    """A prompt's text, or that of the last message of a chat."""
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])


def _train(recipe: Mapping[str, Any], run: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    path, log, begun = run.with_suffix(".toml"), run.with_suffix(".log"), time.monotonic()
    path.write_text(toml(recipe))
    command = [sys.executable, "-m", "understudy.cli.main", "train", str(path), "--quiet"]
    with log.open("w") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT)
        lines: list[dict[str, Any]] = []
        with killed_at_the_end(process):
            while (
                process.poll() is None
                and time.monotonic() - begun < options.limit
                and len(lines) < options.steps
            ):
                time.sleep(0.1)
                lines = _lines(run / "metrics.jsonl")
    lines = _lines(run / "metrics.jsonl")
    print(f"{run.name}: {len(lines)} steps in {time.monotonic() - begun:.0f} s", flush=True)
    notes = [
        line for line in log.read_text(errors="replace").splitlines() if "memory" in line or "padded" in line
    ]
    print("\n".join(notes if lines else log.read_text(errors="replace").splitlines()[-25:]), flush=True)
    return lines


def _lines(metrics: Path) -> list[dict[str, Any]]:
    if not metrics.exists():
        return []
    whole = [line for line in metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [line for line in map(json.loads, whole) if line["step"] >= 1]


def _measured_replica(options: argparse.Namespace, length: int, new: int) -> float | None:
    """Peak bytes of a scorer with the replica's defaults, in a process of its own."""
    words = [
        sys.executable,
        str(Path(__file__)),
        options.teacher,
        options.student,
        str(options.text),
        "--replica",
    ]
    words += ["--length", str(length), "--new", str(new)]
    try:
        found = subprocess.run(words, capture_output=True, text=True, timeout=90, check=True)
        return float(found.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError) as error:
        print(
            f"the replica's peak was not measured: {error} {getattr(error, 'stderr', '')[-800:]}", flush=True
        )
        return None


def _replica_peak(options: argparse.Namespace) -> None:
    frozen = load_frozen(options.teacher, dtype="bfloat16", device="cuda")
    scorer = Scorer("teacher", frozen, ScorerOptions(chunk_bytes=2048 << 20))
    warm_up(scorer)
    chance = np.random.default_rng(0)
    count = max(1, 4 * 16384 // options.length)
    items = []
    for index in range(count):
        tokens = chance.integers(0, 150_000, options.length).astype(np.int32)
        positions = np.arange(options.length - options.new, options.length, dtype=np.int32)
        items.append(ScoreItem(f"row-{index}", tokens, positions, Signal.TOPK, TOPK))
    for _ in range(2):
        scorer.score(request_of(items))
    print(torch.cuda.max_memory_allocated(), flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("teacher")
    parser.add_argument("student")
    parser.add_argument("text", type=Path)
    parser.add_argument("--label", default="1.5B")
    parser.add_argument("--rows", type=int, default=4, help="long rows of a step")
    parser.add_argument("--length", type=int, default=32_000, help="tokens of a long row")
    parser.add_argument("--new", type=int, default=1024, help="new tokens of a long row")
    parser.add_argument("--short", type=int, default=512, help="tokens of a short row")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--compile", action="store_true", help="student.compile and teachers.teacher.compile")
    parser.add_argument("--limit", type=float, default=110.0, help="seconds for one case")
    parser.add_argument(
        "--replica", action="store_true", help="only measure a scorer's peak (used by itself)"
    )
    parser.add_argument("--out", type=Path, help="folder of the result file")
    return parser.parse_args()


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
