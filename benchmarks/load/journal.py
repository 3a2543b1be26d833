"""A million rows through the journal with 10,000 in flight, over a kill -9 in the middle.

    python benchmarks/load/journal.py                    predicted and measured, minutes
    python benchmarks/load/journal.py --rows 20000       a short one

Rows are made as rollouts are: issued in batches, written one by one after up to half a second, scored by a second
write, claimed in the order of keys, read, acknowledged; a checkpoint (sync, settle) every 100 steps. The process is
killed at half of the rows and started again. Afterwards `checker.violations` of the nemesis reads the journal.

Latency: from the call to its return, in a histogram whose buckets are 2 % apart. Memory: the process's resident
set (VmRSS) after each twentieth of the rows; growth is the median of the last quarter less that of the second one,
in the process that was started last. SQLite's own memory (`sqlite3_memory_used`: its page cache, at most 64 MB) is told apart.

Predicted before the first measurement, on two cores that other programs use too: 5,000 rows a second, a write p50
of 3 ms and p99 of 60 ms, an acknowledgement p99 of 100 ms, and 8 bytes for each settled key: growth below 16 MB.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import ctypes.util
import json
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil

from understudy.dataplane.base import Order
from understudy.dataplane.embedded import EmbeddedDataPlane

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "nemesis"))
from checker import History, Promise, violations
from reading import read_journal

from hardware import cpu_name
from histogram import Histogram
from step_problem import Row, save

IN_FLIGHT, BATCH, TRAIN = 10_000, 250, "train"
CHECKPOINT_EVERY = 100
LONGEST_ROLLOUT = 0.5


class Load:
    """One process's part: makes, trains and checks rows until all are settled."""

    def __init__(self, folder: Path, rows: int) -> None:
        self.rows = rows
        self.plane = EmbeddedDataPlane.open(folder, max_rows=IN_FLIGHT, max_bytes=2**31, spill_bytes=2**20)
        with sqlite3.connect(folder / "journal.sqlite") as journal:
            self.step = journal.execute(
                "SELECT COALESCE(MAX(step), 0) FROM events WHERE kind = 'trained'"
            ).fetchone()[0]
        self.times = {name: Histogram() for name in ("write", "read", "acknowledge", "checkpoint")}
        self.memory: list[float] = []
        self.pages: list[float] = []
        self.most = 0
        self.chance = random.Random(0)
        self.tasks: set[asyncio.Task[None]] = set()

    async def _timed(self, name: str, call: Awaitable[Any]) -> Any:
        began = time.perf_counter()
        result = await call
        self.times[name].add(time.perf_counter() - began)
        return result

    async def _make(self, key: str) -> None:
        await asyncio.sleep(self.chance.uniform(0, LONGEST_ROLLOUT))
        await self._timed("write", self.plane.put(TRAIN, {key: {"tokens": tokens_of(key)}}))
        await asyncio.sleep(self.chance.uniform(0, LONGEST_ROLLOUT))
        await self._timed("write", self.plane.put(TRAIN, {key: {"score": float(number_of(key))}}))

    def _begin(self, key: str) -> None:
        task = asyncio.create_task(self._make(key))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _issue(self) -> None:
        for start in range(0, self.rows, BATCH):
            keys = [f"{number:08d}_0_0" for number in range(start, min(start + BATCH, self.rows))]
            for key in await self.plane.issue(TRAIN, keys, step=start // BATCH + 1):
                self._begin(key)

    async def go(self) -> dict[str, Any]:
        left = self.rows - self.settled()
        for key, row in (await self.plane.list(TRAIN)).items():  # what a killed process left
            if "score" not in row.columns:
                self._begin(key)
        issuing = asyncio.create_task(self._issue())
        began, done = time.perf_counter(), 0
        while done < left:
            lease = await self.plane.claim(
                TRAIN, min(BATCH, left - done), fields=("tokens", "score"), order=Order.KEY
            )
            columns = await self._timed("read", self.plane.get(lease.meta))
            check(lease.meta.keys, columns)
            self.step += 1
            await self._timed("acknowledge", self.plane.ack(lease, step=self.step))
            done += len(lease.meta.keys)
            self.most = max(self.most, (await self.plane.depth(TRAIN)).rows)
            if self.step % CHECKPOINT_EVERY == 0:
                await self._timed("checkpoint", self._checkpoint())
            if done % max(BATCH, self.rows // 20) < BATCH:
                self.memory.append(psutil.Process().memory_info().rss / 1e6)
                self.pages.append(sqlite_bytes() / 1e6)
                print(json.dumps({"done": self.rows - left + done}), flush=True)
        seconds = time.perf_counter() - began
        await issuing
        await self.plane.close()
        return {
            "rows": left, "seconds": seconds, "most": self.most, "memory": self.memory, "pages": self.pages, "steps": self.step,
            "times": {name: one.summary() for name, one in self.times.items()},
        }  # fmt: skip

    async def _checkpoint(self) -> None:
        await self.plane.sync()
        await self.plane.settle(self.step)

    def settled(self) -> int:
        return len(self.plane._store.partitions[TRAIN].settled)


def sqlite_bytes() -> int:
    """What the process's SQLite holds; 0 where its library cannot be asked."""
    name = ctypes.util.find_library("sqlite3")
    if name is None:
        return 0
    used = ctypes.CDLL(name).sqlite3_memory_used
    used.restype = ctypes.c_int64
    return int(used())


def number_of(key: str) -> int:
    return int(key.partition("_")[0])


def tokens_of(key: str) -> np.ndarray:
    return np.arange(number_of(key), number_of(key) + 16, dtype=np.int32)


def check(keys: tuple[str, ...], columns: dict[str, Any]) -> None:
    """Each row holds what was written under its key."""
    wanted = np.concatenate([tokens_of(key) for key in keys])
    assert np.array_equal(columns["tokens"].values.numpy(), wanted), "a row holds another row's tokens"
    assert columns["score"] == [float(number_of(key)) for key in keys], "a row holds another row's score"


def growth_of(readings: list[float]) -> float:
    quarter = max(1, len(readings) // 4)
    return median(readings[-quarter:]) - median(readings[quarter : 2 * quarter] or readings)


def measure(rows: int, out: Path | None) -> bool:
    with tempfile.TemporaryDirectory(prefix="understudy-load-") as name:
        command = [sys.executable, __file__, "--rows", str(rows), "--folder", name]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
            assert first.stdout is not None
            for line in first.stdout:
                if json.loads(line).get("done", 0) >= rows // 2:
                    first.send_signal(signal.SIGKILL)
                    break
            before = json.loads(line)["done"]
        assert first.returncode == -signal.SIGKILL, first.returncode
        print(f"killed at {before} rows", flush=True)
        second = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(second.stdout.splitlines()[-1])
        size = (Path(name) / "journal.sqlite").stat().st_size / 1e6
        events, in_flight = read_journal(Path(name))
        steps = found["steps"]
    trained = sum(event.sign for event in events if event.kind == "trained")
    lines = [{"step": step, "actor/loss": 0.0} for step in range(1, steps + 1)]
    wrong = violations(History((), events, in_flight, lines), History(), Promise(steps, False, False, None))
    memory = found["memory"]
    growth, pages = growth_of(memory), growth_of(found["pages"])
    table = [
        Row("rows through the journal, over one kill -9", trained, "rows", goal=f"{rows}", met=trained == rows),
        Row("rows lost, trained twice or with another row's content", rows - trained + len(wrong), "rows", goal="0", met=not wrong and trained == rows),
        Row("rows in flight, at most", found["most"], "rows", goal=">= 9,750", met=found["most"] >= IN_FLIGHT - BATCH),
        Row("rows per second, two writes each", round(found["rows"] / found["seconds"]), "rows/s", goal=">= 5,000 (predicted)", met=found["rows"] / found["seconds"] >= 5000),
        Row("memory after the last row", round(memory[-1], 1), "MB"),
        Row(f"growth of memory without SQLite's page cache, {found['rows']} rows", round(growth - pages, 1), "MB", goal="<= 16 (predicted: 8 bytes a key)", met=growth - pages <= 16),
        Row("growth of SQLite's page cache", round(pages, 1), "MB", goal="<= 64, its limit", met=pages <= 64),
        Row("journal file at the end", round(size, 1), "MB"),
    ]  # fmt: skip
    goals = {"write": (3, 60), "acknowledge": (None, 100)}
    for what, summary in found["times"].items():
        for part, goal in zip(("p50", "p99"), goals.get(what, (None, None)), strict=True):
            value = round(summary[part] * 1e3, 2)
            target = ("", None) if goal is None else (f"<= {goal} (predicted)", value <= goal)
            table.append(Row(f"{what}, {part}", value, "ms", goal=target[0], met=target[1]))
    for row in table:
        print(f"{row.name:<60} {row.value} {row.unit} {row.goal} {'' if row.met is None else row.met}")
    print(*wrong, sep="\n")
    save("load_journal", cpu_name(), table, out)
    return not wrong and trained == rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="be the process that makes the rows, in this folder")
    parser.add_argument("--out", type=Path, help="folder of the result file")
    options = parser.parse_args()
    if options.folder is None:
        return int(not measure(options.rows, options.out))

    async def load() -> dict[str, Any]:
        return await Load(options.folder, options.rows).go()

    print(json.dumps(asyncio.run(load())), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
