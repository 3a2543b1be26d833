"""Large rows through both data planes by 1 to 16 clients: rows/s and GB/s; a part of dataplane.py.

A row has 16,384 tokens with the teacher's 64 best: ids and logprobs, two jagged columns of 4.2 MB. Writers
are tasks of the plane's process, as rollouts are. Readers are tasks there for the embedded plane; for
TransferQueue each is a connection of its own (`QueueReader`), as a remote rank has. On both, `put` returns
when the row would survive kill -9.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from understudy.dataplane.embedded import EmbeddedDataPlane
from understudy.types.batch import BatchMeta

CLIENTS = (1, 2, 4, 8, 16)
TOKENS, BEST = 16_384, 64
SMALL_ROWS = 1024
LOGPROBS = np.random.default_rng(0).standard_normal((TOKENS, BEST)).astype(np.float32)
FIELDS = ("teacher_topk_logprobs", "teacher_ids")
ROW = {FIELDS[0]: LOGPROBS, FIELDS[1]: LOGPROBS.view(np.int32)}
MAX_ROWS, MAX_BYTES = 10_000, 8 * 2**30
Read = Callable[[int, BatchMeta], Awaitable[Any]]


async def through(plane: Any, rows: int, clients: int, read: Read) -> dict[str, float]:
    """Write `rows` rows by `clients` writers, read them by as many readers, take them out."""
    keys = [f"{i:05d}_0_0" for i in range(rows)]

    async def write(mine: Sequence[str]) -> None:
        for key in mine:
            await plane.put("bench", {key: ROW})

    began = time.perf_counter()
    await asyncio.gather(*(write(keys[client::clients]) for client in range(clients)))
    put = time.perf_counter() - began
    lease = await plane.claim("bench", rows)
    began = time.perf_counter()
    await asyncio.gather(
        *(read(client, part) for client, part in enumerate(lease.meta.chunk(clients)) if part.keys)
    )
    got = time.perf_counter() - began
    await plane.ack(lease, step=1)
    size = rows * sum(cell.nbytes for cell in ROW.values()) / 1e9
    return {
        "put rows/s": rows / put, "put GB/s": size / put, "get rows/s": rows / got, "get GB/s": size / got
    }  # fmt: skip


async def small_rows(plane: Any, rows: int, clients: int) -> float:
    """Rows of a few hundred bytes per second through put, claim and ack."""
    cells = {"tokens": np.arange(64, dtype=np.int32), "reward": 1.0}

    async def client(number: int) -> None:
        for at in range(number, rows, clients):
            await plane.put("small", {f"{at}_0_0": cells})

    began = time.perf_counter()
    await asyncio.gather(*(client(number) for number in range(clients)))
    await plane.ack(await plane.claim("small", rows), step=2)
    return rows / (time.perf_counter() - began)


async def embedded(folder: Path, rows: int, clients: int) -> dict[str, float]:
    plane = EmbeddedDataPlane.open(folder, max_rows=MAX_ROWS, max_bytes=MAX_BYTES, spill_bytes=2**20)
    try:
        found = await through(plane, rows, clients, lambda _, meta: plane.get(meta, FIELDS))
        return found | {"small rows/s": await small_rows(plane, SMALL_ROWS, clients)}
    finally:
        await plane.close()


async def queued(folder: Path, rows: int, clients: int, link: Any) -> dict[str, float]:
    module: Any = import_module("understudy.dataplane.transfer_queue.plane")
    plane = module.TransferQueueDataPlane.open_on(link, folder, max_rows=MAX_ROWS, max_bytes=MAX_BYTES)
    readers = [module.QueueReader(link.address) for _ in range(clients)]
    try:
        found = await through(plane, rows, clients, lambda client, meta: readers[client].get(meta, FIELDS))
        return found | {"small rows/s": await small_rows(plane, SMALL_ROWS, clients)}
    finally:
        for reader in readers:
            reader.close()
        await plane.close()


@contextmanager
def queue(units: int) -> Iterator[Any]:
    """A Ray of our own with a TransferQueue; None where the extra is not installed."""
    if find_spec("ray") is None or find_spec("transfer_queue") is None:
        print("TransferQueue is left out: pip install understudy[ray]")
        yield None
        return
    ray: Any = import_module("understudy.cluster.ray_cluster")
    cluster = ray.RayCluster(ray.RaySettings(cpus=units + 1))
    link: Any = import_module("understudy.dataplane.transfer_queue.link").QueueLink.start(units)
    try:
        yield link
    finally:
        link.close()
        cluster.close()


def measure_clients(clients: Sequence[int], rows: int, units: int) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    with queue(units) as link:
        for count in clients:
            for name in ("embedded", "transfer_queue")[: 1 if link is None else 2]:
                with tempfile.TemporaryDirectory(prefix="dataplane-clients-") as folder:
                    work = (
                        embedded(Path(folder), rows, count)
                        if name == "embedded"
                        else queued(Path(folder), rows, count, link)
                    )
                    found = asyncio.run(work)
                rounded = {key: round(value, 3) for key, value in found.items()}
                out.append({"name": f"16k x top-64 rows, {name}", "clients": count, "rows": rows, **rounded})
                print("  ".join(f"{key} {value}" for key, value in out[-1].items()), flush=True)
    return out
