"""Functions on columns, called with the names of rows: `@bridged` in one file.

    python examples/bridged_columns.py

A worker's methods are written for real columns. Called with a `BatchMeta`, they fetch the columns they name,
and what they return is written to the data plane as new columns; the caller only ever holds names. `extra`
is what the batch carries besides its rows.
"""

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from understudy.dataplane.embedded import EmbeddedDataPlane
from understudy.dataplane.transfer_queue.bridge import ColumnDict, bridged, bridging
from understudy.losses.advantages import grpo
from understudy.types.batch import BatchMeta


class Advantages:
    """Adds columns to rows: group-relative advantages, and the student's mean log-probability."""

    @bridged("reward")
    def advantages(self, data: ColumnDict, extra: dict[str, Any] | None = None) -> ColumnDict:
        """GRPO's advantages; `extra["groups"]` says which rows answer the same prompt."""
        groups = (extra or {}).get("groups") or ["all"] * len(data["reward"])
        rewards = torch.tensor([float(reward) for reward in data["reward"]])
        return {"advantage": grpo(rewards, groups).tolist()}

    @bridged("logprobs")
    async def confidence(self, data: ColumnDict) -> ColumnDict:
        return {"confidence": [float(row.mean()) for row in data["logprobs"]]}


async def main(folder: Path) -> dict[str, Any]:
    plane = EmbeddedDataPlane.open(folder, max_rows=100, max_bytes=2**20, spill_bytes=2**20)
    rewards = {"a_0_0": 1.0, "a_1_0": 0.0, "b_0_0": 1.0, "b_1_0": 1.0}
    for number, (key, reward) in enumerate(rewards.items()):
        logprobs = np.full(3, -0.5 * (number + 1), dtype=np.float32)
        await plane.put("train", {key: {"reward": reward, "logprobs": logprobs}})

    batch = BatchMeta("train", tuple(rewards), extra={"groups": ["a", "a", "b", "b"]})
    functions = Advantages()
    with bridging(plane):
        batch = await functions.advantages(data=batch)
        batch = await functions.confidence(batch)
        nothing = await functions.advantages(BatchMeta("train", ()))
    columns = dict(await plane.get(batch, ("advantage", "confidence")))
    await plane.close()
    return {"fields": batch.fields, "rows of an empty batch": len(nothing), **columns}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for name, value in asyncio.run(main(Path(folder))).items():
            print(f"{name}: {value}")
