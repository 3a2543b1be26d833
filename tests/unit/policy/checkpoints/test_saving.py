"""A run ends only after its last checkpoint is written, so no writer thread reaches into the next attempt."""

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


@pytest.mark.parametrize("beside", [False, True])
def test_the_end_of_a_run_waits_for_what_is_being_written(tmp_path: Path, beside: bool) -> None:
    store = SlowStore(tmp_path / "checkpoints")
    saver, state = BackgroundSaver(store), PolicyState({"weight": torch.ones(3)}, {}, {"step": 3})

    async def lost_meanwhile(system: Any) -> None:
        """As when a rank is lost while the step is saved."""
        saving = asyncio.create_task(save_checkpoint(system, 3))
        while not store.writing:
            await asyncio.sleep(0.01)
        saving.cancel()
        await asyncio.wait({saving})
        raise ZeroDivisionError

    async def run() -> None:
        try:
            async with asyncio.TaskGroup() as background:
                trainer = SimpleNamespace(async_save=beside, keep_best=False)
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
                await lost_meanwhile(system)
        finally:
            await asyncio.to_thread(saver.close)
            there.extend(store.steps())

    there: list[int] = []
    with pytest.raises(ExceptionGroup):
        asyncio.run(run())
    assert there == [3] and CheckpointStore(store.root).load().extra["cursor"] == 7
