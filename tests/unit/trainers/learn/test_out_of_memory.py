"""A step that runs out of GPU memory is retried with smaller micro-batches, as long as no weight has changed."""

from __future__ import annotations

import io
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from learning_rig import assert_same_weights, batch_of, learner_of, recipe_of
from rich.console import Console

from understudy.observability.live import LiveView
from understudy.trainers.learn.update import learn
from understudy.trainers.metrics import usage_metrics
from understudy.types.loss import LossInputs, LossOutput, StudentHead

FULL = "CUDA out of memory. Tried to allocate 256.00 MiB. GPU 0 has a total capacity of 139.80 GiB."


class SmallGpu:
    """An objective that runs out of memory above a number of trained tokens in one pass."""

    def __init__(self, objective: Any, fits: int) -> None:
        self._objective, self._fits = objective, fits
        self.passes: list[int] = []

    def __call__(self, head: StudentHead, inputs: LossInputs) -> LossOutput:
        output: LossOutput = self._objective(head, inputs)
        self.passes.append(len(output.per_token_N))
        if self.passes[-1] > self._fits:
            raise torch.OutOfMemoryError(FULL)
        return output


def small_gpu_learner(tokens: int, fits: int, **changes: Any) -> tuple[Any, io.StringIO]:
    learner = learner_of(recipe_of(trainer={"micro_batch_tokens": tokens}))
    shown = io.StringIO()
    learner.state.view = LiveView(0, console=Console(file=shown, width=400))
    learner.objective = SmallGpu(learner.objective, fits)
    learner.settings = replace(learner.settings, **changes)
    return learner, shown


def usage_of(learner: Any, result: Any) -> dict[str, float]:
    learner.publisher, learner.batches = None, SimpleNamespace(metrics=dict)
    producer = SimpleNamespace(engine=None, rollouts=SimpleNamespace(metrics=dict))
    system: Any = SimpleNamespace(learner=learner, producer=producer)
    return usage_metrics(system, result, 1.0)


def test_micro_batches_are_halved_until_they_fit_and_stay_small_for_later_steps() -> None:
    batch = batch_of()
    learner, shown = small_gpu_learner(tokens=64, fits=12)
    result = learn(learner, batch)
    assert max(learner.objective.passes[-result.micro_batches :]) <= 12 < learner.objective.passes[0]
    assert learner.micro_batches.most_tokens in (32, 16)
    assert usage_of(learner, result)["perf/micro_batch_tokens"] == learner.micro_batches.most_tokens
    assert shown.getvalue().count("the GPU's memory was full with micro-batches of 64 tokens") == 1
    plain = learner_of(recipe_of(trainer={"micro_batch_tokens": 64}))
    expected = learn(plain, batch)
    assert result.loss == pytest.approx(expected.loss, abs=1e-6)
    assert_same_weights(learner.policy.model, plain.policy.model)

    passes = len(learner.objective.passes)
    second = learn(learner, batch_of(seed=1))
    assert len(learner.objective.passes) - passes == second.micro_batches, (
        "the second step must start with the smaller size"
    )
    assert shown.getvalue().count("the GPU's memory was full") == 1


def test_micro_batches_that_fit_keep_the_recipes_size() -> None:
    learner, shown = small_gpu_learner(tokens=64, fits=10_000)
    result = learn(learner, batch_of())
    assert usage_of(learner, result)["perf/micro_batch_tokens"] == 64 and not shown.getvalue()


def test_a_single_row_that_does_not_fit_raises_and_leaves_the_weights_unchanged() -> None:
    learner, shown = small_gpu_learner(tokens=20, fits=1)
    before = {name: value.clone() for name, value in learner.policy.model.state_dict().items()}
    with pytest.raises(torch.OutOfMemoryError):
        learn(learner, batch_of())
    assert all(torch.equal(value, before[name]) for name, value in learner.policy.model.state_dict().items())
    assert learner.policy.step == 0 and learner.micro_batches.most_tokens is None and not shown.getvalue()


def test_a_deterministic_run_does_not_retry_with_smaller_micro_batches() -> None:
    learner, _ = small_gpu_learner(tokens=64, fits=12, deterministic=True)
    with pytest.raises(torch.OutOfMemoryError):
        learn(learner, batch_of())
    assert len(learner.objective.passes) == 1


def test_out_of_memory_in_the_optimizer_step_is_not_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some weights may already have changed."""
    learner, _ = small_gpu_learner(tokens=64, fits=10_000)
    calls = []

    def full(*_: Any) -> None:
        calls.append(1)
        raise torch.OutOfMemoryError(FULL)

    monkeypatch.setattr(learner.policy.optimizer, "step", full)
    with pytest.raises(torch.OutOfMemoryError):
        learn(learner, batch_of())
    assert len(calls) == 1
