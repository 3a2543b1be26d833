"""`understudy eval RUN` samples from the ids that the run may use, as the evaluation inside the run does."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from small_runs import ASSETS

from understudy.assembly.usable_ids import keep_usable_ids
from understudy.config.rollout import RolloutConfig
from understudy.engines.base import GenerateRequest, Sampling
from understudy.observability.rundir import RunDir
from understudy.run.evaluate_model import _sampling
from understudy.trainers.models import LoadedModel, load_model
from understudy.types.usable_ids import UsableIds


@pytest.fixture(scope="module")
def student() -> LoadedModel:
    return load_model(str(ASSETS / "models" / "student"), device="cpu")


def greedy(student: LoadedModel, sampling: Sampling) -> list[int]:
    async def body() -> list[int]:
        engine = student.engine(1)
        try:
            prompt = np.arange(10, 16, dtype=np.int32)
            found = await engine.generate([GenerateRequest("row", prompt, sampling, seed=0)])
            return [int(one) for one in found[0].tokens]
        finally:
            await engine.close()

    return asyncio.run(body())


def test_eval_never_generates_an_id_that_another_model_of_the_run_lacks(
    student: LoadedModel, tmp_path: Path
) -> None:
    run, rollout = RunDir.create(str(tmp_path / "run"), "r"), RolloutConfig(max_new_tokens=8, temperature=0.0)
    free = greedy(student, _sampling(rollout, student, run))
    assert _sampling(rollout, student, None) == _sampling(rollout, student, run), (
        "the run has not stored its usable ids"
    )
    keep_usable_ids(run, UsableIds(44, (free[0],)))
    sampling = _sampling(rollout, student, run)
    assert sampling.unusable_ids() == [free[0]]
    assert free[0] not in greedy(student, sampling)
    keep_usable_ids(run, UsableIds(44))  # all 44 ids are usable
    assert greedy(student, _sampling(rollout, student, run)) == free
