"""The simulation compared with real runs: phase times of runs predict throughput, which is compared with the
measured."""

from collections.abc import Callable
from typing import Any

import pytest

import understudy
from understudy.planning.simulation.phase_times import MeasuredRun, combined, measure

Make = Callable[..., dict[str, Any]]
STEPS = 16


def measured(recipe: Make, name: str, batch: int, **overrides: Any) -> MeasuredRun:
    settings = {"trainer__steps": STEPS, "trainer__batch_size": batch, "rollout__max_batch": batch}
    table = recipe(name, **settings, **{"trainer__checkpoint_every": 100, **overrides})
    return measure(understudy.train(table, progress=False).dir)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_throughput_of_a_sync_run_of_another_batch_size_is_predicted_within_15_percent(recipe: Make) -> None:
    """Phase times come from batches of 16 and 64; the prediction is for 32. That run also lies between the
    others in time, so that a change in the machine's load affects both sides. Needs an otherwise idle machine."""
    small, middle, large = (measured(recipe, f"batch-{size}", size) for size in (16, 32, 64))
    predicted = middle.predicted(combined([small, large]))
    print(
        f"sync, batch 32: measured {middle.rows_per_second:.2f} rows/s, predicted {predicted.rows_per_second:.2f}"
    )
    assert predicted.rows_per_second == pytest.approx(middle.rows_per_second, rel=0.15)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("staleness", [0.0, 1.0])
def test_throughput_and_idle_shares_of_an_async_run_are_predicted_within_15_percent(
    recipe: Make, staleness: float
) -> None:
    run = measured(
        recipe,
        "run",
        32,
        trainer__mode="fully_async",
        trainer__max_staleness=staleness,
        run__determinism="fast",
    )
    predicted = run.predicted()
    print(
        f"staleness {staleness}: measured {run.rows_per_second:.2f} rows/s, predicted {predicted.rows_per_second:.2f}; "
        f"{run.costs}"
    )
    assert predicted.rows_per_second == pytest.approx(run.rows_per_second, rel=0.15)
    for side, share in run.idle.items():
        predicted_share = getattr(predicted, f"{side}_idle")
        print(f"staleness {staleness}: {side} idle {share:.2f} measured, {predicted_share:.2f} predicted")
        assert predicted_share == pytest.approx(share, abs=0.15)
