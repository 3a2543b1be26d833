"""A minimal trainer that tests kill: its weights are the list of the rows it was trained on.

It resumes from its last checkpoint as the real one does, takes steps until the last, and reports to the parent
what the data plane has acknowledged. Cells are computed from the key, so an incomplete or mixed row is found.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from understudy.dataplane.base import Order, Retain, RowStatus
from understudy.dataplane.embedded import EmbeddedDataPlane

STEPS, BATCH, CHECKPOINT_EVERY = 8, 6, 2
BOUNDS: dict[str, Any] = {"max_rows": 64, "max_bytes": 4096, "spill_bytes": 1500}


def keys_of(step: int) -> list[str]:
    return [f"{step:03d}-{i}_0_0" for i in range(BATCH)]


def is_poison(key: str) -> bool:
    return key.split("-")[1].startswith("5") and int(key[:3]) % 2 == 0


def rollout_of(key: str) -> dict[str, Any]:
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "little")
    rng = np.random.default_rng(seed)
    return {
        "tokens": rng.integers(0, 1000, rng.integers(1, 900)).astype(np.int32),
        "reward": float(rng.standard_normal()),
    }


def score_of(key: str) -> dict[str, Any]:
    return {"logprobs": -np.abs(rollout_of(key)["tokens"]).astype(np.float32)}


def load_checkpoint(folder: Path) -> dict[str, Any]:
    file = folder / "checkpoint.json"
    return json.loads(file.read_text()) if file.exists() else {"step": 0, "weights": []}


def save_checkpoint(folder: Path, step: int, weights: list[str]) -> None:
    fresh = folder / "checkpoint.tmp"
    fresh.write_text(json.dumps({"step": step, "weights": weights}))
    fresh.replace(folder / "checkpoint.json")


def train_until_killed(folder: str, keep_rows: bool, retain: str, fault: str, reports: Connection) -> None:
    os.environ["UNDERSTUDY_FAULT"] = fault
    asyncio.run(_train(Path(folder), keep_rows, Retain(retain), reports))


async def _train(folder: Path, keep_rows: bool, retain: Retain, reports: Connection) -> None:
    plane = EmbeddedDataPlane.open(folder / "dataplane", retain=retain, **BOUNDS)
    saved = load_checkpoint(folder)
    weights = list(saved["weights"])
    await plane.rewind(saved["step"], keep_rows=keep_rows)
    await plane.settle(saved["step"])
    for step in range(saved["step"] + 1, STEPS + 1):
        await plane.issue("train", keys_of(step), step=step)
        rows = await plane.list("train")
        await asyncio.gather(*(_make(plane, key, rows[key], reports) for key in keys_of(step) if key in rows))
        ready = (await plane.depth("train", step=step)).rows
        lease = await plane.claim(
            "train", ready, step=step, fields=("tokens", "logprobs"), order=Order.KEY, lease_seconds=None
        )
        columns = await plane.get(lease.meta)
        for key, tokens, logprobs in zip(
            lease.meta.keys, columns["tokens"], columns["logprobs"], strict=True
        ):
            assert tokens.numpy().tobytes() == rollout_of(key)["tokens"].tobytes(), key
            assert logprobs.numpy().tobytes() == score_of(key)["logprobs"].tobytes(), key
        weights += lease.meta.keys
        await plane.ack(lease, step)
        reports.send(("acked", step))
        if step % CHECKPOINT_EVERY == 0:
            await plane.sync()
            save_checkpoint(folder, step, weights)
            await plane.settle(step)
    await plane.close()
    reports.send(("done", STEPS))


async def _make(plane: EmbeddedDataPlane, key: str, row: Any, reports: Connection) -> None:
    if is_poison(key):
        await plane.dead_letter("train", key, "poison")
        return
    if row.status is RowStatus.PENDING:
        await plane.put("train", {key: rollout_of(key)})
        reports.send(("rolled out", key))
    if "logprobs" not in row.columns:
        await plane.put("train", {key: score_of(key)})
        reports.send(("scored", key))
