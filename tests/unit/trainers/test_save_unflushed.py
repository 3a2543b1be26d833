"""A disk that does not take a flush: the run says which step is not saved, and what to do."""

from __future__ import annotations

import asyncio
import errno
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from understudy.errors import CheckpointError
from understudy.trainers.checkpoints import save_checkpoint


def test_a_flush_that_fails_is_told_as_a_checkpoint_that_is_not_saved(tmp_path: Path) -> None:
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
