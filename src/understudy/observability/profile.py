"""A trace of single steps of the trainer's process, by torch's profiler (`run.profile_steps`).

RUN/profile/000003.json.gz has every operator of all threads and, on a GPU, every kernel. ui.perfetto.dev and
chrome://tracing open it. Replicas, engine processes and other ranks are processes of their own and are not in it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

FOLDER_NAME = "profile"
logger = logging.getLogger(__name__)


@asynccontextmanager
async def profiled(run: Path, step: int, wanted: bool) -> AsyncIterator[None]:
    """Profiles the body if `wanted`. The trace is written when it ends; a step that fails leaves none."""
    if not wanted:
        yield
        return
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    # The update and the engine run on threads of their own. By default the profiler sees only this one.
    every_thread = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=activities, record_shapes=True, experimental_config=every_thread) as trace:
        yield
    path = run / FOLDER_NAME / f"{step:06d}.json.gz"
    path.parent.mkdir(exist_ok=True)
    await asyncio.to_thread(trace.export_chrome_trace, str(path))
    logger.info("step %d: its trace is in %s", step, path)
