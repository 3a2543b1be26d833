"""Loading code by name: installed modules come first; two recipes may use the same module name."""

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
def restored_python_path() -> Iterator[None]:
    set_python_path([])  # removes the path set by recipes of earlier tests
    yield
    set_python_path([])


def folder(path: Path, number: int) -> str:
    path.mkdir()
    (path / "own_module.py").write_text(f"def number() -> int:\n    return {number}\n")
    (path / "calendar.py").write_text("raise RuntimeError\n")
    return str(path)


def test_a_module_is_loaded_from_the_folder_of_the_current_recipe(tmp_path: Path) -> None:
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


def test_a_tool_process_finds_a_module_beside_the_recipe(tmp_path: Path) -> None:
    set_python_path([folder(tmp_path / "a", 7)])

    async def call() -> tuple[ToolOutcome, str]:
        tool = build_tool("own_module:number", Sandbox(Isolation.NONE, 512))
        result = await tool.call({}, deadline_s=30)
        await tool.close()
        return result.outcome, result.text

    assert asyncio.run(call()) == (ToolOutcome.OK, "7")


def test_a_module_that_raises_on_import_is_named_in_the_config_error(tmp_path: Path) -> None:
    (tmp_path / "broken_module.py").write_text("1 / 0\n")
    set_python_path([str(tmp_path)])
    with pytest.raises(ConfigError, match="importing broken_module raised ZeroDivisionError"):
        load_object("broken_module:f", "rollout.agent")


def test_the_former_path_of_a_moved_module_is_refused_with_the_new_path() -> None:
    with pytest.raises(ConfigError, match=r'write "understudy\.rollout\.rewards\.builtin:gsm8k"'):
        load_object("understudy.rollout.reward:gsm8k", "data.reward")


def test_set_python_path_tolerates_an_entry_already_removed_from_sys_path(tmp_path: Path) -> None:
    first, second = folder(tmp_path / "a", 1), folder(tmp_path / "b", 2)
    set_python_path([first])
    sys.path.remove(first)
    set_python_path([second])
    assert load_object("own_module:number", "data.reward")() == 2
