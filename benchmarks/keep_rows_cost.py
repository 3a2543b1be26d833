"""What `run.keep_rows` costs a step: one run that keeps rows in one of every two blocks of steps.

    python benchmarks/step_cpu.py --keep-rows        on a CPU
    python benchmarks/step.py --keep-rows            on a GPU

Both kinds of blocks are in one process, so that a drift of the machine hits them alike. Which block of a pair keeps
rows is drawn at random: in a fixed order, work that comes every few steps would fall on one kind alone. Rows are written while
the next step is produced, so of the seconds the first step of each block is not counted. The figure is the median, over
neighbouring blocks, of mean seconds a step with rows kept over without, minus one; the interval is the 95 %
interval of that median over 2000 resamples of the pairs. A goal is met or missed if the whole interval lies on
one side of it, else open. Beside the seconds stand the trainer's CPU seconds, from one update to the next:
they say more where other programs use the machine.

As a script: `keep_rows_cost.py BLOCK CPU.json train RECIPE …` is `understudy train RECIPE …` with rows kept in some
blocks of BLOCK steps (`is_on`); CPU.json gets the CPU seconds of each step. With BLOCK 0 rows are kept as the recipe says.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from step_problem import Row, Shape, our_recipe, toml

BLOCK = 2
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
    command = [
        sys.executable,
        __file__,
        str(BLOCK),
        str(folder / "cpu.json"),
        "train",
        str(recipe),
        "--quiet",
    ]
    subprocess.run(command, check=True, env={**os.environ, **environment}, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seconds = {line["step"]: line["time/step"] for line in lines if "time/step" in line}
    cpu = {int(step): spent for step, spent in json.loads((folder / "cpu.json").read_text()).items()}
    kept = len(list((run / "kept_rows").glob("*.jsonl")))
    return [
        *compared(f"{shape.name}: a step with rows kept", paired(seconds, BLOCK, skip=1), GOAL),
        *compared(
            f"{shape.name}: a step's CPU with rows kept, trainer's process", paired(cpu, BLOCK, skip=0), GOAL
        ),
        Row(f"{shape.name}: steps whose rows were kept", kept, "steps"),
        Row(f"{shape.name}: median step", round(median(seconds.values()), 5), "s"),
    ]


def compared(name: str, found: tuple[float, float, float], goal: float) -> list[Row]:
    """Rows of a median extra share and its interval."""
    middle, low, high = (round(value, 5) for value in found)
    met = True if high < goal else False if low > goal else None
    return [
        Row(name, middle, "slower", goal=f"< {goal}", met=met),
        Row(f"{name}, 95 % interval, from", low, "slower"),
        Row(f"{name}, 95 % interval, to", high, "slower"),
    ]


def is_on(step: int, block: int) -> bool:
    """Whether what is measured is switched on in this step: in one of each two neighbouring blocks."""
    pair, place = divmod((step - 1) // block, 2)
    return place == random.Random(pair).randrange(2)


def paired(seconds: Mapping[int, float], block: int, skip: int) -> tuple[float, float, float]:
    """(median, low, high) of the extra share of blocks that are on (`is_on`) over their neighbours. `skip`: steps at
    the start of a block that do not count. The first pair of blocks warms up."""
    pairs: dict[int, dict[bool, list[float]]] = {}
    for step, one in seconds.items():
        if (step - 1) % block >= skip:
            pair = pairs.setdefault((step - 1) // (2 * block), {})
            pair.setdefault(is_on(step, block), []).append(one)
    whole = [pair for n, pair in sorted(pairs.items()) if n >= 1 and len(pair) == 2]
    return _interval([mean(pair[True]) / mean(pair[False]) - 1 for pair in whole])


def _interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    draw = random.Random(0)
    medians = sorted(median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return median(ratios), medians[50], medians[-51]


def main() -> None:
    from understudy.cli.main import program  # noqa: PLC0415
    from understudy.trainers import sync  # noqa: PLC0415

    block, whole = int(sys.argv[1]), sync.update_and_keep
    begun: dict[int, float] = {}

    async def in_some_blocks(system: Any, lease: Any, batch: Any, step: int) -> Any:
        begun[step] = time.process_time()
        if block and not is_on(step, block):
            settings = replace(system.producer.settings, keep_rows=0)
            system = replace(system, producer=replace(system.producer, settings=settings))
        return await whole(system, lease, batch, step)

    sync.update_and_keep = in_some_blocks
    place = Path(sys.argv[2])
    sys.argv[1:] = sys.argv[3:]
    try:
        program()
    finally:
        spent = {step: begun[step + 1] - begun[step] for step in begun if step + 1 in begun}
        place.write_text(json.dumps(spent))


if __name__ == "__main__":
    main()
