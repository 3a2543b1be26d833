"""What happens at the same time when a run starts."""

import asyncio
import threading
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn

import pytest

from understudy.assembly import build as building
from understudy.assembly import engine_and_teachers
from understudy.assembly.build import build
from understudy.cluster.local import LocalProcesses
from understudy.config import load_recipe
from understudy.observability.live import LiveView
from understudy.observability.rundir import RunDir

RECIPE = Path(str(resources.files("understudy.assets") / "quickstart" / "recipe.toml"))


class StopHere(Exception):
    pass


def test_prompts_are_measured_for_the_engine_while_teachers_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rendering 100,000 prompts takes half a minute, and so does the start of a teacher."""
    begun = threading.Event()

    def longest_request(*arguments: Any) -> None:
        begun.set()

    async def start_teachers(*arguments: Any) -> NoReturn:
        assert await asyncio.to_thread(begun.wait, 10), "prompts are measured only once teachers have started"
        raise StopHere

    monkeypatch.setattr(engine_and_teachers, "longest_request", longest_request)
    monkeypatch.setattr(engine_and_teachers, "start_teachers", start_teachers)
    recipe = load_recipe(RECIPE, [f"run.dir={tmp_path}"])

    async def body() -> None:
        run = RunDir.create(recipe.run.dir, recipe.run.name)
        processes = LocalProcesses(run.logs, 60.0)
        try:
            with pytest.raises(StopHere):
                async with build(recipe, run, processes, LiveView(2, enabled=False)):
                    pass
        finally:
            await processes.close()

    asyncio.run(body())


def test_replicas_start_while_the_student_is_loaded_and_are_stopped_if_it_cannot_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe(RECIPE, [f"run.dir={tmp_path}"])

    async def body() -> None:
        run = RunDir.create(recipe.run.dir, recipe.run.name)
        processes, started = LocalProcesses(run.logs, 60.0), []

        async def load_inputs(*arguments: Any) -> NoReturn:
            async with asyncio.timeout(60):
                while len(processes.children) < len(recipe.teachers):
                    await asyncio.sleep(0.02)
            started.extend(processes.children.values())
            raise StopHere

        monkeypatch.setattr(building, "load_inputs", load_inputs)
        try:
            with pytest.raises(StopHere):
                async with build(recipe, run, processes, LiveView(2, enabled=False)):
                    pass
            assert started and not processes.children
            assert not any(child.alive for child in started)
        finally:
            await processes.close()

    asyncio.run(body())
