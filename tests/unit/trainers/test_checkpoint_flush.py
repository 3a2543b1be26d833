"""A flush that fails or waits during a save: the error names the step, and the wait counts as checkpoint time."""

from __future__ import annotations

import asyncio
import errno
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from understudy.errors import CheckpointError
from understudy.observability.spans import Spans
from understudy.trainers.checkpoints import save_checkpoint


def test_a_failed_flush_is_reported_as_a_checkpoint_error_with_its_step(tmp_path: Path) -> None:
    async def fails() -> None:
        raise OSError(errno.EIO, "Input/output error")

    state = SimpleNamespace(
        saves=SimpleNamespace(under_way=set()),
        spans=SimpleNamespace(span=lambda *_, **__: nullcontext()),
        plane=SimpleNamespace(sync=fails),
        run=SimpleNamespace(path=tmp_path),
    )
    system: Any = SimpleNamespace(
        state=state, learner=SimpleNamespace(settings=SimpleNamespace(trainer=SimpleNamespace()))
    )
    with pytest.raises(
        CheckpointError, match=r"step 7: a file of .* cannot be flushed: .*Input/output error.*resume"
    ):
        asyncio.run(save_checkpoint(system, 7))


def test_waiting_for_the_previous_save_counts_as_checkpoint_time(tmp_path: Path) -> None:
    async def saves() -> float:
        async def fails() -> None:
            raise OSError(errno.EIO, "Input/output error")

        spans = Spans(None)
        state = SimpleNamespace(
            saves=SimpleNamespace(under_way={asyncio.create_task(asyncio.sleep(0.3))}),
            view=SimpleNamespace(work=lambda text: nullcontext()),
            spans=spans,
            plane=SimpleNamespace(sync=fails),
            run=SimpleNamespace(path=tmp_path),
        )
        learner = SimpleNamespace(settings=SimpleNamespace(trainer=SimpleNamespace()))
        with pytest.raises(CheckpointError):
            await save_checkpoint(SimpleNamespace(state=state, learner=learner), 7)  # type: ignore[arg-type]
        return spans.take_totals()["checkpoint"]

    assert asyncio.run(saves()) >= 0.29
