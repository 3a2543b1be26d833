"""The quickstart's recipe for commands, with few rows."""

from importlib import resources
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments of a command: the recipe and a file of 640 rows. Checking all 10,000 rows takes a second of CPU time."""
    assets = Path(str(resources.files("understudy.assets") / "quickstart"))
    few = tmp_path_factory.mktemp("rows") / "train.jsonl"
    lines = (assets / "data" / "train.jsonl").read_text().splitlines(keepends=True)
    few.write_text("".join(lines[:640]))
    return [str(assets / "recipe.toml"), f"data.train={few}"]
