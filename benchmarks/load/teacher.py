"""Sixty-four clients against one teacher server, with 10,000 rows in flight.

    python benchmarks/load/teacher.py                    predicted and measured, a minute or two
    python benchmarks/load/teacher.py --rows 12000       a short one

The server is a real replica process of the quickstart's teacher on one thread. The clients are those that a pool has
for a replica, 32 in each of two processes; each keeps 4 requests of 40 rows under way. Every reply passes the client's
own checks, and a row that is asked again must get the same bits.

Latency: of one request, from the call to the checked reply, in a histogram whose buckets are 2 % apart. Memory: the
server's resident set (VmRSS), read every second; growth is the median of the last quarter of the readings less that
of the second quarter. Fairness: the client with the fewest replies when the time is half over beside the one with the most.

Predicted before the first measurement, on two cores that other programs use too: 1,000 rows a second, so a p50 of
10 s and a p99 of 20 s (a request waits for the 10,240 rows before it); no request fails; growth below 32 MB.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from importlib import resources
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil

from understudy.teacher.clients.native import ReplicaClient
from understudy.types.scores import ScoreItem, Signal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "contract" / "teacher"))
from teacher_rig import TOKEN, await_ready, spawn_replica

from hardware import cpu_name
from histogram import Histogram
from step_problem import Row, save

CLIENTS, PROCESSES, REQUESTS, ROWS_EACH, TOPK = 64, 2, 4, 40, 8
KINDS = 8
"""Different requests; each is asked many times."""
MODEL = Path(str(resources.files("understudy.assets"))) / "quickstart" / "models" / "teacher-add"


def request(kind: int) -> list[ScoreItem]:
    chance = np.random.default_rng(kind)
    rows = []
    for number in range(ROWS_EACH):
        tokens = chance.integers(0, 20, int(chance.integers(8, 24))).astype(np.int32)
        positions = np.arange(1, len(tokens), dtype=np.int32)
        rows.append(ScoreItem(f"{kind}-{number}", tokens, positions, Signal.TOPK, TOPK))
    return rows


async def clients(url: str, requests: int) -> dict[str, Any]:
    """The clients of one process; `requests` in all."""
    times, replies, failures = Histogram(), [0] * (CLIENTS // PROCESSES), []
    bits: dict[int, set[str]] = {kind: set() for kind in range(KINDS)}
    left = iter(range(requests))
    half: list[int] = []

    async def ask(client: ReplicaClient, who: int) -> None:
        for number in left:
            kind = number % KINDS
            began = time.perf_counter()
            try:
                scores = await client.score(request(kind), timeout=300.0)
            except Exception as error:  # a benchmark counts every failure
                failures.append(f"{type(error).__name__}: {error}")
                continue
            times.add(time.perf_counter() - began)
            replies[who] += 1
            digest = hashlib.sha256()
            for one in scores:
                digest.update(np.ascontiguousarray(one.logprobs).tobytes())
            bits[kind].add(digest.hexdigest())
            if sum(replies) == requests // 2:
                half.extend(replies)

    all_clients = [ReplicaClient(url, TOKEN, teacher="add", replica="0") for _ in replies]
    began = time.perf_counter()
    await asyncio.gather(
        *(ask(client, who) for who, client in enumerate(all_clients) for _ in range(REQUESTS))
    )
    seconds = time.perf_counter() - began
    await asyncio.gather(*(client.close() for client in all_clients))
    return {
        "counts": times.counts, "replies": half or replies, "failures": failures, "seconds": seconds,
        "bits": {kind: sorted(found) for kind, found in bits.items()}, "answered": sum(replies),
    }  # fmt: skip


def measure(rows: int, out: Path | None) -> bool:
    requests = max(CLIENTS * REQUESTS, rows // ROWS_EACH) // PROCESSES
    with tempfile.TemporaryDirectory(prefix="understudy-load-") as name:
        replica = spawn_replica(MODEL, Path(name), "add", "--batching", "by_request")
        try:
            url = await_ready(replica, Path(name), 300)
            server, memory, over = psutil.Process(replica.process.pid), [], threading.Event()

            def read_memory() -> None:
                while not over.wait(1.0):
                    memory.append(server.memory_info().rss / 1e6)

            reader = threading.Thread(target=read_memory)
            reader.start()
            command = [sys.executable, __file__, "--url", url, "--rows", str(requests)]
            started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(PROCESSES)]
            found = [json.loads(one.communicate()[0]) for one in started]
            over.set()
            reader.join()
        finally:
            replica.end()
    times = Histogram()
    for one in found:
        times.merge(one["counts"])
    failures = [failure for one in found for failure in one["failures"]]
    answered = sum(one["answered"] for one in found)
    several = sum(len({bit for one in found for bit in one["bits"][kind]}) > 1 for kind in found[0]["bits"])
    replies = [count for one in found for count in one["replies"]]
    seconds = max(one["seconds"] for one in found)
    quarter = max(1, len(memory) // 4)
    growth = median(memory[-quarter:]) - median(memory[quarter : 2 * quarter] or memory)
    rate, p50, p99 = answered * ROWS_EACH / seconds, times.quantile(0.5), times.quantile(0.99)
    lost = requests * PROCESSES - answered
    table = [
        Row("clients of one teacher server", CLIENTS, "clients"),
        Row("rows in flight", CLIENTS * REQUESTS * ROWS_EACH, "rows", goal=">= 10,000", met=True),
        Row("requests without a checked reply", lost, "requests", goal="0", met=lost == 0),
        Row(f"of {KINDS} requests asked again and again: with more than one answer", several, "requests", goal="0", met=several == 0),
        Row("rows scored per second", round(rate), "rows/s", goal=">= 1,000 (predicted)", met=rate >= 1000),
        Row("request of 40 rows, p50", round(p50, 2), "s", goal="<= 10 (predicted)", met=p50 <= 10),
        Row("request of 40 rows, p99", round(p99, 2), "s", goal="<= 20 (predicted)", met=p99 <= 20),
        Row("replies of the slowest client beside the fastest, at half", round(min(replies) / max(replies), 2), ""),
        Row("memory of the server, at most", round(max(memory), 1), "MB"),
        Row("growth of the server's memory", round(growth, 1), "MB", goal="<= 32 (predicted)", met=growth <= 32),
    ]  # fmt: skip
    for row in table:
        print(f"{row.name:<66} {row.value} {row.unit} {row.goal} {'' if row.met is None else row.met}")
    print(*failures[:5], sep="\n")
    save("load_teacher", cpu_name(), table, out)
    return lost == 0 and several == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument("--url", help="be a process of clients of this server; --rows are requests then")
    parser.add_argument("--out", type=Path, help="folder of the result file")
    options = parser.parse_args()
    if options.url is None:
        return int(not measure(options.rows, options.out))
    print(json.dumps(asyncio.run(clients(options.url, options.rows))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
