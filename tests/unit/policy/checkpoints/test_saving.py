"""A run ends only after its last checkpoint is written, so that no writer thread interferes with the next attempt."""

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from understudy.observability.metrics import MetricsWriter
from understudy.observability.spans import Spans
from understudy.policy.checkpoints.background import BackgroundSaver
from understudy.policy.checkpoints.checkpoint import CheckpointStore
from understudy.policy.checkpoints.state import PolicyState
from understudy.trainers.checkpoints import save_checkpoint
from understudy.trainers.system import Tally


class SlowStore(CheckpointStore):
    writing = False

    def save(self, *args: Any, **kwargs: Any) -> Path:
        self.writing = True
        time.sleep(0.5)
        return super().save(*args, **kwargs)


class Plane:
    async def sync(self) -> None:
        return

    async def settle(self, step: int) -> None:
        return


@pytest.mark.parametrize("async_save", [False, True])
def test_a_run_that_fails_during_a_save_ends_only_after_the_checkpoint_is_written(
    tmp_path: Path, async_save: bool
) -> None:
    store = SlowStore(tmp_path / "checkpoints")
    saver, state = BackgroundSaver(store), PolicyState({"weight": torch.ones(3)}, {}, {"step": 3})

    async def fail_during_a_save(system: Any) -> None:
        """Raises while the step is saved, as the loss of a rank does."""
        saving = asyncio.create_task(save_checkpoint(system, 3))
        while not store.writing:
            await asyncio.sleep(0.01)
        saving.cancel()
        await asyncio.wait({saving})
        raise ZeroDivisionError

    async def run() -> None:
        try:
            async with asyncio.TaskGroup() as background:
                trainer = SimpleNamespace(async_save=async_save, keep_best=False)
                system = SimpleNamespace(
                    producer=SimpleNamespace(
                        cursor=SimpleNamespace(state=lambda: 7), teachers=SimpleNamespace(manifests=dict)
                    ),
                    learner=SimpleNamespace(
                        settings=SimpleNamespace(trainer=trainer),
                        policy=SimpleNamespace(state=lambda: state),
                        critic=None,
                    ),
                    state=SimpleNamespace(
                        plane=Plane(),
                        metrics=MetricsWriter(tmp_path / "metrics.jsonl"),
                        spans=Spans(None),
                        tally=Tally(),
                        saves=SimpleNamespace(store=store, saver=saver, under_way=set()),
                        background=background,
                        callbacks=None,
                    ),
                )
                await fail_during_a_save(system)
        finally:
            await asyncio.to_thread(saver.close)
            saved_steps.extend(store.steps())

    saved_steps: list[int] = []
    with pytest.raises(ExceptionGroup):
        asyncio.run(run())
    assert saved_steps == [3] and CheckpointStore(store.root).load().extra["cursor"] == 7
