"""An engine that shares the trainer's tensors also shares its picture features: the vision tower runs once for both."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from test_image_runs import table_of

from understudy.assembly.build import build
from understudy.cluster.local import LocalProcesses
from understudy.config import parse_recipe
from understudy.engines.local.engine import HFEngine
from understudy.nn.vision_features import VisionFeatures
from understudy.observability.live import LiveView
from understudy.observability.rundir import RunDir
from understudy.policy.policy import Policy
from understudy.trainers.pacing.idle_meter import ProducerMeters
from understudy.trainers.stopping import Interrupts
from understudy.trainers.sync import take_step


@pytest.mark.slow
def test_engine_and_trainer_in_one_process_compute_each_picture_s_features_once(tmp_path: Path) -> None:
    recipe = parse_recipe(table_of(tmp_path, text_rows=0))

    async def body() -> None:
        run = RunDir.create(recipe.run.dir, recipe.run.name)
        processes = LocalProcesses(run.logs, 60.0)
        try:
            async with build(recipe, run, processes, LiveView(2, enabled=False)) as system:
                engine, policy = system.producer.engine, system.learner.policy
                assert isinstance(engine, HFEngine) and isinstance(policy, Policy)
                await take_step(system, 1, Interrupts(print), ProducerMeters())
                features = policy.forward.features
                assert features is not None and features is engine._features
                names = list(features._kept)
                assert features.computed == features.forwards == len(names) == 8, "eight prompts in a step"
                # A resumed run may compute in the trainer the features that the first launch computed in the engine.
                by_engine, by_trainer = (
                    VisionFeatures(features._reader).of(model, names)
                    for model in (engine._model, policy.model)
                )
                for name in names:
                    assert torch.equal(by_engine[name].pooled, by_trainer[name].pooled)
        finally:
            await processes.close()

    asyncio.run(body())
