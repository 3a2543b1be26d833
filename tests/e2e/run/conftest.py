from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from api_runs import ADD, SMALL, STUDENT, external, rows

import understudy


@pytest.fixture
def distill(tmp_path: Path, teacher_urls: dict[str, str]) -> Callable[..., understudy.Run]:
    """Runs `understudy.distill` with small settings and the teacher for sums; keyword arguments change them."""

    def run(name: str = "run", **changes: Any) -> understudy.Run:
        given = {"student": STUDENT, "teacher": ADD, "data": rows("add"), "progress": False, **SMALL}
        if not isinstance(changes.get("teacher", ADD), dict):
            given |= external("teacher", teacher_urls["add"])
        return understudy.distill(**{**given, "run__dir": tmp_path / name, **changes})

    return run
