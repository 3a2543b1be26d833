"""Helpers for small runs on a cluster of simulated nodes: recipes, their metrics and weights, lost nodes."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import psutil
from safetensors.torch import load_file
from small_runs import ASSETS, start_cli, write_toml

STORE = 80 * 2**20
POOL = {"pools": {"train": {"nodes": 2, "cpus_per_node": 1}}, "roles": {"student": "train"}}
"""Two machines with one rank each; the first is the trainer's machine."""
QUEUE = {"backend": "transfer_queue", "storage_units": 1}


def ranks_recipe(folder: Path, steps: int = 2, **changes: dict[str, Any]) -> dict[str, Any]:
    """A recipe with two ranks, one teacher and a few small rows per step."""
    table: dict[str, dict[str, Any]] = {
        "student": {"model": str(ASSETS / "models" / "student"), "device": "cpu"},
        "teachers": {"add": {"model": str(ASSETS / "models" / "teacher-add")}},
        "loss": {"topk": 4},
        "rollout": {"max_new_tokens": 4},
        "data": {"train": str(ASSETS / "data" / "train.jsonl")},
        "trainer": {
            "steps": steps, "batch_size": 8, "learning_rate": 1e-3, "checkpoint_every": 1000, "ranks": 2
        },
        "dataplane": {},
        "cluster": {},
        "run": {"dir": str(folder), "threads": 1, "determinism": "full"},
    }  # fmt: skip
    for section, entries in changes.items():
        table[section] = {**table[section], **entries}
    return table


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def metrics_without_clock(path: Path) -> list[dict[str, float]]:
    """The metrics of every step that do not depend on the clock."""
    return [
        {name: value for name, value in line.items() if not name.startswith(("time/", "perf/"))}
        for line in lines(path)
    ]


def bits(path: Path, step: int) -> tuple[list[dict[str, float]], dict[str, bytes]]:
    """The metrics of a run and the weights of its checkpoint after `step`."""
    weights = load_file(path / "checkpoints" / f"step-{step:06d}" / "model.safetensors")
    return metrics_without_clock(path), {name: value.numpy().tobytes() for name, value in weights.items()}


def node_of(cluster: Any, pid: int) -> Any:
    """The simulated node that a process runs on."""
    ancestors = {parent.pid for parent in psutil.Process(pid).parents()}
    return next(
        node for node in cluster.worker_nodes if node.all_processes["raylet"][0].process.pid in ancestors
    )


class LostNode:
    """Removes the simulated node of a process while the run continues."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self._removals: list[asyncio.Future[None]] = []

    def lose(self, pid: int) -> None:
        removal = asyncio.to_thread(self._cluster.remove_node, node_of(self._cluster, pid), False)
        self._removals.append(asyncio.ensure_future(removal))

    @property
    def is_lost(self) -> bool:
        return bool(self._removals) and self._removals[0].exception() is None


def killed_and_resumed(table: dict[str, Any], step: int = 2) -> Path:
    """Kills the trainer of a sync run in this step, and resumes it to its end; returns the run directory."""
    run = Path(table["run"]["dir"])
    path = write_toml(run.with_suffix(".toml"), table)
    killed = start_cli("train", str(path), "--quiet", fault=f"sync.after_update:{step}")
    output, _ = killed.communicate(timeout=300)
    assert killed.returncode == -signal.SIGKILL, output
    resumed = start_cli("resume", str(run), "--quiet")
    output, _ = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, output
    return run
