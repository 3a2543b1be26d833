"""Where a run stands, saved and taken up again.

A checkpoint of step s holds the policy after s steps and the cursor after s batches. The journal's ledger and
metrics.jsonl hold at least everything up to s (both are made durable before the checkpoint gets its name) and maybe
more; on resume that more is forgotten, under `determinism = "fast"` only as far as it was trained.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from understudy.errors import CheckpointError
from understudy.observability.faults import point
from understudy.observability.metrics import cut_back
from understudy.observability.rundir import RunDir
from understudy.policy.checkpoint import Checkpoint, CheckpointStore
from understudy.trainers.system import System


async def save_checkpoint(system: System, step: int) -> None:
    with system.spans.span("checkpoint", step=step):
        await system.plane.sync()
        system.metrics.sync()
        system.spans.flush()
        extra = {
            "cursor": system.cursor.state(),
            "teachers": system.manifests,
            "rows_trained": system.tally.rows_trained,
        }
        await asyncio.to_thread(system.checkpoints.save, step, system.policy.state(), extra)
        point("sync.after_checkpoint")
        # No checkpoint older than the oldest one kept can be returned to.
        await system.plane.settle(min(system.checkpoints.steps()))


def last_checkpoint(run: RunDir, keep: int) -> Checkpoint | None:
    store = CheckpointStore(run.checkpoints, keep)
    return store.load() if store.steps() else None


def forget_after(run: RunDir, step: int | None) -> None:
    """Cut the run's plain files back to a checkpoint (None: to the very start)."""
    cut_back(run.metrics, step)
    cut_back(run.samples, step)


async def restore(system: System, checkpoint: Checkpoint) -> None:
    """Put a freshly built system where the checkpoint stands."""
    verify_teachers(checkpoint.extra["teachers"], system.manifests)
    system.policy.load_state(checkpoint.policy)
    system.cursor.restore(checkpoint.extra["cursor"])
    system.tally.rows_trained = int(checkpoint.extra["rows_trained"])


def verify_teachers(saved: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]]) -> None:
    """A resumed run must be judged by the same teachers; the weights' hash tells."""
    for name, manifest in saved.items():
        current = now.get(name, {})
        for key in ("weights_sha256", "vocab_fingerprint", "dtype"):
            if manifest.get(key) != current.get(key):
                raise CheckpointError(
                    f"teacher {name} is not the one this run was started with: {key} was {manifest.get(key)}, is {current.get(key)}; "
                    "put the old teacher back, or start a new run"
                )
