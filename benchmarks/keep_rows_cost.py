"""What `run.keep_rows` costs a step: one run that keeps rows in every other block of steps.

    python benchmarks/step_cpu.py --keep-rows        on a CPU
    python benchmarks/step.py --keep-rows            on a GPU

Blocks alternate within one process, so that a drift of the machine hits both kinds alike. Rows are written while
the next step is produced, so the first step of each block is not counted. The figure is the median, over
neighbouring blocks, of mean seconds a step with rows kept over without, minus one; the interval is the 95 %
interval of that median over 2000 resamples of the pairs.

As a script: `keep_rows_cost.py BLOCK train RECIPE …` is `understudy train RECIPE …` with rows kept in odd blocks of
BLOCK steps.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from step_problem import Row, Shape, our_recipe, toml

BLOCK = 6
GOAL = 0.02


def cost(
    shape: Shape,
    folder: Path,
    student: str,
    teacher: str,
    prompts: Path,
    engine: Mapping[str, Any],
    blocks: int,
) -> list[Row]:
    """Rows of the result file."""
    run = folder / "kept"
    shape = replace(shape, steps=BLOCK * blocks)
    recipe = folder / "kept.toml"
    recipe.write_text(toml(our_recipe(shape, run, student, teacher, prompts, engine)))
    environment = {"OMP_NUM_THREADS": str(shape.threads)} if shape.threads else {}
    command = [sys.executable, __file__, str(BLOCK), "train", str(recipe), "--quiet"]
    subprocess.run(command, check=True, env={**os.environ, **environment}, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seconds = {line["step"]: line["time/step"] for line in lines if "time/step" in line}
    ratio, low, high = paired(seconds, BLOCK, skip=1)
    kept = len(list((run / "kept_rows").glob("*.jsonl")))
    name = f"{shape.name}: a step with rows kept"
    return [
        Row(name, round(ratio, 5), "slower", goal=f"< {GOAL}", met=ratio < GOAL),
        Row(f"{name}, 95 % interval, from", round(low, 5), "slower"),
        Row(f"{name}, 95 % interval, to", round(high, 5), "slower"),
        Row(f"{shape.name}: steps whose rows were kept", kept, "steps"),
        Row(f"{shape.name}: median step", round(median(seconds.values()), 5), "s"),
    ]


def paired(seconds: Mapping[int, float], block: int, skip: int) -> tuple[float, float, float]:
    """(median, low, high) of the extra share of odd blocks over their even neighbours. `skip`: steps at the
    start of a block that do not count. The first two blocks warm up."""
    blocks: dict[int, list[float]] = {}
    for step, one in seconds.items():
        if (step - 1) % block >= skip:
            blocks.setdefault((step - 1) // block, []).append(one)
    means = [mean(blocks[n]) for n in sorted(blocks) if n >= 2]
    pairs = [(means[n], means[n + 1]) for n in range(0, len(means) - 1, 2)]
    return _interval([odd / even - 1 for even, odd in pairs])


def _interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    draw = random.Random(0)
    medians = sorted(median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return median(ratios), medians[50], medians[-51]


def main() -> None:
    from understudy.cli.main import program  # noqa: PLC0415
    from understudy.trainers import sync  # noqa: PLC0415

    block, whole = int(sys.argv[1]), sync.update_and_keep

    async def in_odd_blocks(system: Any, lease: Any, batch: Any, step: int) -> Any:
        if (step - 1) // block % 2 == 0:
            settings = replace(system.producer.settings, keep_rows=0)
            system = replace(system, producer=replace(system.producer, settings=settings))
        return await whole(system, lease, batch, step)

    sync.update_and_keep = in_odd_blocks
    sys.argv[1:] = sys.argv[2:]
    program()


if __name__ == "__main__":
    main()
