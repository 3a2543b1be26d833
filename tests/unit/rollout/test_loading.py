"""Code by name: modules beside a recipe are found last, and two recipes may call theirs alike."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from understudy.errors import ConfigError
from understudy.rollout.loading import load_object, set_python_path
from understudy.rollout.tools.base import ToolOutcome
from understudy.rollout.tools.library import build_tool
from understudy.rollout.tools.sandbox import Isolation, Sandbox


@pytest.fixture(autouse=True)
def leaves_the_path_alone() -> Iterator[None]:
    set_python_path([])  # of recipes that other tests read
    yield
    set_python_path([])


def folder(path: Path, number: int) -> str:
    path.mkdir()
    (path / "own_module.py").write_text(f"def number() -> int:\n    return {number}\n")
    (path / "calendar.py").write_text("raise RuntimeError\n")
    return str(path)


def test_each_recipe_s_folder_has_its_own_modules(tmp_path: Path) -> None:
    first, second = folder(tmp_path / "a", 1), folder(tmp_path / "b", 2)
    before = list(sys.path)
    for place, number in ((first, 1), (second, 2), (first, 1)):
        set_python_path([place])
        assert load_object("own_module:number", "data.reward")() == number and sys.path == [*before, place]
    assert load_object("calendar:isleap", "data.reward")(2000), "an installed module wins"
    set_python_path([])
    assert sys.path == before
    with pytest.raises(ConfigError, match=r"own_module cannot be imported .* beside the recipe"):
        load_object("own_module:number", "data.reward")


def test_a_tool_beside_the_recipe_is_found_by_its_process(tmp_path: Path) -> None:
    set_python_path([folder(tmp_path / "a", 7)])

    async def call() -> tuple[ToolOutcome, str]:
        tool = build_tool("own_module:number", Sandbox(Isolation.NONE, 512))
        result = await tool.call({}, deadline_s=30)
        await tool.close()
        return result.outcome, result.text

    assert asyncio.run(call()) == (ToolOutcome.OK, "7")


def test_a_module_that_raises_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken_module.py").write_text("1 / 0\n")
    set_python_path([str(tmp_path)])
    with pytest.raises(ConfigError, match="importing broken_module raised ZeroDivisionError"):
        load_object("broken_module:f", "rollout.agent")


def test_a_module_that_was_moved_is_refused_with_its_new_name() -> None:
    with pytest.raises(ConfigError, match=r'write "understudy\.rollout\.rewards\.builtin:gsm8k"'):
        load_object("understudy.rollout.reward:gsm8k", "data.reward")


def test_a_program_that_changed_its_path_meanwhile_is_no_error(tmp_path: Path) -> None:
    first, second = folder(tmp_path / "a", 1), folder(tmp_path / "b", 2)
    set_python_path([first])
    sys.path.remove(first)
    set_python_path([second])
    assert load_object("own_module:number", "data.reward")() == 2
