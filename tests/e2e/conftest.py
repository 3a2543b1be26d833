"""Real teachers, started once for the whole session, and recipes small enough for a test."""

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from small_runs import ASSETS, TOKEN_VARIABLE


@pytest.fixture(scope="session")
def teacher_urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """URLs of one scoring server per quickstart teacher, with batches composed by request as under full determinism."""
    from teacher_rig import TOKEN, shared_fork_server  # imports torch, which tests without teachers need not

    os.environ[TOKEN_VARIABLE] = TOKEN
    fork_server = shared_fork_server(tmp_path_factory)
    children = {
        name: fork_server.fork(ASSETS / "models" / f"teacher-{name}", name=name) for name in ("add", "sort")
    }
    yield {name: asyncio.run(child.ready(120)).url for name, child in children.items()}
    for child in children.values():
        asyncio.run(child.end())


@pytest.fixture(scope="session")
def train_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first 640 rows of the quickstart: checking all 10,000 would cost a second of CPU time before each run."""
    few = tmp_path_factory.mktemp("rows") / "train.jsonl"
    lines = (ASSETS / "data" / "train.jsonl").read_text().splitlines(keepends=True)
    few.write_text("".join(lines[:640]))
    return few


@pytest.fixture
def recipe(teacher_urls: dict[str, str], train_rows: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Makes the recipe of a small run; keyword arguments `section__key=value` change it."""

    def make(name: str = "run", **overrides: Any) -> dict[str, Any]:
        table: dict[str, Any] = {
            "student": {"model": str(ASSETS / "models" / "student")},
            "teachers": {
                key: {
                    "model": str(ASSETS / "models" / f"teacher-{key}"),
                    "key": key,
                    "placement": "external",
                    "urls": [url],
                    "token_env": TOKEN_VARIABLE,
                }
                for key, url in teacher_urls.items()
            },
            "loss": {"topk": 8},
            "rollout": {"max_new_tokens": 8, "max_batch": 8},
            "data": {
                "train": str(train_rows),
                "reward": "understudy.rollout.rewards.builtin:exact_match",
            },
            "trainer": {"steps": 4, "batch_size": 16, "learning_rate": 1e-3, "checkpoint_every": 2},
            "run": {"dir": str(tmp_path / name), "threads": 1},
        }
        for path, value in overrides.items():
            *sections, key = path.split("__")
            place = table
            for section in sections:
                place = place.setdefault(section, {})
            place[key] = value
        return table

    return make
