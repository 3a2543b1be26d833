"""Same seed, same metrics, to the bit, although rollouts and scoring run concurrently."""

from collections.abc import Callable
from typing import Any

import pytest
from safetensors.numpy import load_file

import understudy
from understudy.dataplane.ledger import audit
from understudy.observability.metrics import without_clock

Make = Callable[..., dict[str, Any]]


def metrics_without_clock(run: understudy.Run) -> list[dict[str, Any]]:
    return [without_clock(line) for line in run.metrics]


def test_two_runs_with_full_determinism_give_the_same_bits(recipe: Make) -> None:
    # Step 2 shows whether an update and the rollouts with its weights repeat, step 3 whether Adam's moments do.
    short = {"rollout__n": 2, "trainer__steps": 3}
    first = understudy.train(recipe("a", **short), progress=False)
    second = understudy.train(recipe("b", **short), progress=False)
    assert metrics_without_clock(first) == metrics_without_clock(second)
    weights = [
        load_file(run.dir / "checkpoints" / "step-000003" / "model.safetensors") for run in (first, second)
    ]
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])
    other = understudy.train(recipe("c", rollout__n=2, trainer__steps=1, run__seed=1), progress=False)
    assert metrics_without_clock(other)[0]["actor/loss"] != metrics_without_clock(first)[0]["actor/loss"]


@pytest.mark.slow
def test_another_max_batch_gives_the_same_lengths_and_nearly_the_same_losses(recipe: Make) -> None:
    """Another `rollout.max_batch` composes other batches: losses agree to rounding, response lengths exactly."""
    small = understudy.train(recipe("a", rollout__max_batch=3, trainer__steps=2), progress=False)
    large = understudy.train(recipe("b", rollout__max_batch=64, trainer__steps=2), progress=False)
    for one, other in zip(small.metrics, large.metrics, strict=True):
        assert one["response_length/mean"] == other["response_length/mean"]
        assert one["actor/loss"] == pytest.approx(other["actor/loss"], rel=1e-5)


def test_fast_mode_trains_every_row_once(recipe: Make) -> None:
    run = understudy.train(recipe(run__determinism="fast"), progress=False)
    report = audit(run.dir)
    assert report.balanced and report.trained == 64 and report.per_step == {1: 16, 2: 16, 3: 16, 4: 16}


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param({"kind": "k2", "signal": "sampled"}, marks=pytest.mark.slow, id="k2-sampled"),
        pytest.param(
            {"kind": "k1", "signal": "sampled", "policy_gradient": True},
            marks=pytest.mark.slow,
            id="k1-sampled",
        ),
        pytest.param(
            {"kind": "reverse_kl", "signal": "topk", "topk": 8}, marks=pytest.mark.slow, id="reverse_kl-topk"
        ),
        {"kind": "jsd", "signal": "hidden"},
    ],
    ids=lambda loss: f"{loss['kind']}-{loss['signal']}",
)
def test_each_loss_trains_with_gradients(recipe: Make, loss: dict[str, Any]) -> None:
    run = understudy.train(recipe(trainer__steps=2, loss=loss), progress=False)
    assert run.steps == 2 and all(line["actor/grad_norm"] > 0 for line in run.metrics)


@pytest.mark.slow
def test_runs_train_on_rewards_alone_and_on_rewards_with_distillation(recipe: Make) -> None:
    together = recipe("a", trainer__steps=2, rollout__n=4, trainer__batch_size=4, loss__task_coef=1.0)
    assert understudy.train(together, progress=False).last["actor/pg_loss"] is not None
    alone = recipe(
        "b",
        trainer__steps=2,
        rollout__n=4,
        trainer__batch_size=4,
        loss={"task_coef": 1.0, "distill_coef": 0.0},
        teachers={},
    )
    run = understudy.train(alone, progress=False)
    assert "actor/distillation/loss" not in run.last and audit(run.dir).trained == 32
