"""Generation of the in-process engine beside vLLM's, lengths as in nano-vllm's public benchmark, on one GPU in one run.

    python benchmarks/rollout/public_load.py                          0.6B and 1.7B, about six minutes on an H200
    python benchmarks/rollout/public_load.py --shapes 8b --loads public
    python benchmarks/rollout/public_load.py --shapes tiny --systems ours --loads early-end

    public      256 sequences, prompts and outputs of 100 to 1,024 tokens (133,966 output tokens), all at once
    long-tail   1,024 sequences through 256 places, outputs of 64 to 1,900 tokens, P(length ≥ x) ≈ x^−1.2
    early-end   512 sequences through 256 places, up to 1,024 tokens; every five-hundredth id of the vocabulary ends one

Random bf16 weights in Qwen3's shapes, temperature 1, the log-probability of every token delivered. Both systems run in
processes of their own, which take turns: all of vLLM's start at once (each with as much memory for keys and values as the
load needs) and are measured one after another; then ours. Rates are output tokens over seconds, the median of the rounds.
vLLM is that of UNDERSTUDY_VLLM_PYTHON (this interpreter, when not set).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from hardware import cpu_name, gpu_name
from rollout_models import SHAPES, TINY, write_model
from step_problem import Row, killed_at_the_end, save, show

SIDE = Path(__file__).with_name("public_load_side.py")
LOADS = ("public", "long-tail", "early-end")
ROUNDS = {"public": 3, "long-tail": 1, "early-end": 1}
GOAL = 1.0


class Side:
    """One system with one model: a process that says when it is ready and measures when it is told to."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process, self._log = process, log

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a system ended early:\n{self._log.read_text()[-3000:]}")
        return dict(json.loads(line))

    def measure(self, load: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        print(load, file=self._process.stdin, flush=True)
        return self.answer()


@contextmanager
def started(system: str, shape: str, model: Path, logs: Path) -> Iterator[Side]:
    python = os.environ.get("UNDERSTUDY_VLLM_PYTHON", sys.executable) if system == "vllm" else sys.executable
    log = logs / f"{system}-{shape}.log"
    with log.open("w") as sink:
        process = subprocess.Popen(
            [python, str(SIDE), system, shape, str(model)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sink, text=True,
        )  # fmt: skip
        with killed_at_the_end(process):
            yield Side(process, log)


def rates_of(side: Side, system: str, shape: str, loads: Sequence[str]) -> dict[str, float]:
    """Output tokens a second for each load."""
    print(f"{system}, {shape}: ready after {side.answer()['seconds']:.0f} s", flush=True)
    rates = {}
    for load in loads:
        rounds = [side.measure(load) for _ in range(ROUNDS[load])]
        rates[load] = median(found["tokens"] / found["seconds"] for found in rounds)
        each = ", ".join(f"{found['tokens']:,} tokens in {found['seconds']:.2f} s" for found in rounds)
        print(f"{system}, {shape}, {load}: {each}", flush=True)
    return rates


def rows_of(
    shapes: Sequence[str], loads: Sequence[str], found: dict[tuple[str, str], dict[str, float]]
) -> list[Row]:
    rows = []
    for shape in shapes:
        for load in loads:
            ours, peer = (found.get((system, shape), {}).get(load) for system in ("ours", "vllm"))
            if ours is None:
                continue
            row = Row(f"{shape}, {load}: hf engine", round(ours, 1), "output tokens/s")
            if peer is not None:
                row.peer, row.peer_value, row.ratio = (
                    "vLLM 0.25 in process",
                    round(peer, 1),
                    round(ours / peer, 3),
                )
                row.goal, row.met = f">= {GOAL} x", ours / peer >= GOAL
            rows.append(row)
    return rows


def main() -> None:
    options = _options()
    shapes, loads = options.shapes.split(","), options.loads.split(",")
    found: dict[tuple[str, str], dict[str, float]] = {}
    hardware = gpu_name() if torch.cuda.is_available() else cpu_name()
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    with tempfile.TemporaryDirectory(prefix="understudy-load-") as name:
        folder = Path(name)
        for shape in shapes:
            write_model(
                folder / shape, TINY if shape == "tiny" else SHAPES[shape], device, dtype, config_only=True
            )
        for system in options.systems.split(","):
            together = [shapes] if system == "vllm" else [[shape] for shape in shapes]
            for group in together:
                with ExitStack() as stack:
                    sides = [stack.enter_context(started(system, one, folder / one, folder)) for one in group]
                    for shape, side in zip(group, sides, strict=True):
                        found[system, shape] = rates_of(side, system, shape, loads)
                rows = rows_of(shapes, loads, found)
                print(*map(show, rows), sep="\n", flush=True)
                if rows:
                    save(options.name, hardware, rows, options.out)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shapes", default="0.6b,1.7b", help="0.6b, 1.7b, 8b, tiny; several with commas")
    parser.add_argument("--loads", default=",".join(LOADS))
    parser.add_argument("--systems", default="vllm,ours")
    parser.add_argument("--name", default="public_load", help="of the result file")
    parser.add_argument("--out", type=Path, default=None)
    return parser.parse_args()


if __name__ == "__main__":
    main()
