"""Helpers for runs started from Python: arguments of a small run, rows, interrupts as a notebook sends them."""

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from small_runs import ASSETS, TOKEN_VARIABLE

from understudy.observability.metrics import read_metrics

STUDENT = ASSETS / "models" / "student"
ADD, SORT = ASSETS / "models" / "teacher-add", ASSETS / "models" / "teacher-sort"
SMALL: dict[str, Any] = {
    "trainer__batch_size": 8,
    "trainer__steps": 2,
    "trainer__checkpoint_every": 1,
    "rollout__max_new_tokens": 8,
    "loss__topk": 8,
    "run__threads": 1,
}


def rows(source: str, count: int = 16) -> list[dict[str, Any]]:
    lines = (json.loads(line) for line in (ASSETS / "data" / "train.jsonl").read_text().splitlines())
    return [row for row in lines if row["data_source"] == source][:count]


def half_reward(row: dict[str, Any], text: str) -> float:
    return 0.5


def external(name: str, url: str) -> dict[str, Any]:
    keys = {"placement": "external", "urls": [url], "token_env": TOKEN_VARIABLE}
    return {f"teachers__{name}__{key}": value for key, value in keys.items()}


def interrupt_after(run: Path, steps: int) -> threading.Thread:
    """Ctrl-C as a notebook's interrupt button sends it: a signal to the process that holds the run."""

    def act() -> None:
        deadline = time.monotonic() + 100
        while len(read_metrics(run / "metrics.jsonl")) < steps and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def run_in_notebook_cell(call: Callable[[], Any]) -> Any:
    """Calls `call` as ipykernel runs a cell: in a task of the main thread's loop, with Python's SIGINT handler."""

    async def cell() -> Any:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return call()
        finally:
            signal.signal(signal.SIGINT, before)

    return asyncio.run(cell())
