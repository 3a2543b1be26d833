"""Runs simulations from seed to seed until they have made as many steps as asked for.

    python tests/nemesis/simulation/simulate.py --steps 1000000          as `make simulate STEPS=1000000`
    python tests/nemesis/simulation/simulate.py --part run --seed 17     one seed again

A step is a call, reply, fault or change of state of the code under test; turns of the event loop are not counted.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1] / "e2e")]

import simulated_pool  # noqa: E402
import simulated_run  # noqa: E402
import walks  # noqa: E402

_MEMORY = Path("/dev/shm")
Judge = Callable[[int], tuple[list[str], int]]


def parts(folder: Path) -> dict[str, Judge]:
    return {
        "run": lambda seed: simulated_run.judge(seed, folder / "plane"),
        "pool": simulated_pool.judge,
        "health": walks.health,
        "slots": walks.slots,
    }


def until(judge: Judge, steps: int, first: int = 0) -> tuple[list[str], int, int]:
    """Problems of the first seed that has any, steps made, seeds tried."""
    made, seed = 0, first
    while made < steps:
        problems, some = judge(seed)
        made, seed = made + some, seed + 1
        if problems:
            return problems, made, seed - first
    return [], made, seed - first


def scratch_folder() -> str:
    """In memory, where there is such a place: a simulated disk needs no real one."""
    return tempfile.mkdtemp(prefix="understudy-simulation-", dir=_MEMORY if _MEMORY.is_dir() else None)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100_000, help="of each part")
    parser.add_argument("--part", choices=("run", "pool", "health", "slots"), help="one part alone")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="this seed alone")
    options = parser.parse_args()
    folder = scratch_folder()
    failed = False
    try:
        for name, judge in parts(Path(folder)).items():
            if options.part not in (None, name):
                continue
            started = time.monotonic()
            if options.seed is not None:
                problems, made, seeds = until(judge, 1, options.seed)
            else:
                problems, made, seeds = until(judge, options.steps, options.first)
            seconds = time.monotonic() - started
            print(f"{name}: {seeds} seeds, {made} steps, {made / seconds:,.0f} a second", flush=True)
            if problems:
                failed = True
                seed = (options.first if options.seed is None else options.seed) + seeds - 1
                print(*(f"  violation: {one}" for one in problems[:5]), sep="\n")
                print(
                    f"  repeat: python tests/nemesis/simulation/simulate.py --part {name} --seed {seed}",
                    flush=True,
                )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
