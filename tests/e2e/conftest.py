"""Real teachers, started once for the whole session, and recipes small enough for a test."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from small_runs import ASSETS, TOKEN, TOKEN_VARIABLE


@pytest.fixture(scope="session")
def teacher_urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """One scoring server per teacher of the quickstart, composed by request as under full determinism."""
    folder = tmp_path_factory.mktemp("teachers")
    processes, ready = [], {}
    os.environ[TOKEN_VARIABLE] = TOKEN
    for name in ("add", "sort"):
        ready[name] = folder / f"{name}.ready"
        arguments = ["--model", str(ASSETS / "models" / f"teacher-{name}"), "--name", name, "--threads", "1"]
        arguments += ["--token-env", TOKEN_VARIABLE, "--ready-file", str(ready[name])]
        log = (folder / f"{name}.log").open("wb")
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "understudy.teacher.server", *arguments], stdout=log, stderr=log
            )
        )
    deadline = time.monotonic() + 120
    while not all(path.exists() for path in ready.values()):
        assert time.monotonic() < deadline and all(process.poll() is None for process in processes), (
            "teachers did not start"
        )
        time.sleep(0.1)
    yield {name: json.loads(path.read_text())["url"] for name, path in ready.items()}
    for process in processes:
        process.kill()
        process.wait()


@pytest.fixture
def recipe(teacher_urls: dict[str, str], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Tables of a small run; keyword arguments `section__key=value` change them."""

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
                "train": str(ASSETS / "data" / "train.jsonl"),
                "reward": "understudy.rollout.reward:exact_match",
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
