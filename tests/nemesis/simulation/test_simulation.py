"""The parts of a run that need no model, simulated under virtual clocks; `make simulate STEPS=1000000` takes more steps."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import simulated_pool
import simulated_run
from simulate import parts, until
from virtual_time import Stalled, run

STEPS = {"run": 3000, "pool": 4000, "health": 40_000, "slots": 10_000}


@pytest.mark.parametrize("part", STEPS)
def test_simulated_faults_cause_no_violations(part: str, tmp_path: Path) -> None:
    problems, _, seeds = until(parts(tmp_path)[part], STEPS[part])
    assert problems == [], f"seed {seeds - 1}"


@pytest.mark.faults
@pytest.mark.parametrize("part", STEPS)
def test_simulated_faults_cause_no_violations_in_many_steps(part: str, tmp_path: Path) -> None:
    problems, _, seeds = until(parts(tmp_path)[part], 100 * STEPS[part], first=1000)
    assert problems == [], f"seed {1000 + seeds - 1}"


def test_the_same_seed_gives_the_same_history(tmp_path: Path) -> None:
    plan = next(seed for seed in range(100) if simulated_run.SimulatedRun(seed, tmp_path).plan.workers)
    histories = [simulated_run.SimulatedRun(plan, tmp_path / "plane").carry_out() for _ in range(2)]
    assert histories[0] == histories[1] and histories[0].events
    assert simulated_pool.judge(3) == simulated_pool.judge(3)


def test_virtual_time_passes_without_waiting_and_a_stalled_program_raises() -> None:
    async def sleep_for_hours() -> float:
        await asyncio.gather(asyncio.sleep(3600), asyncio.sleep(7200))
        return asyncio.get_running_loop().time()

    assert run(sleep_for_hours()) == pytest.approx(7200)
    with pytest.raises(Stalled, match=r"at 5\.00 s"):
        run(_stall())


async def _stall() -> None:
    await asyncio.sleep(5)
    await asyncio.Event().wait()
