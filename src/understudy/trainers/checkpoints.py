"""Saves a run's state as a checkpoint and restores it on resume.

With `trainer.async_save` the state is copied, and the copy is written while the next step runs. The journal
frees rows only when a checkpoint is final. So after a kill at any moment there is a final checkpoint and
everything after it.

A checkpoint of step s holds the policy after s steps and the cursor after s batches. The journal's ledger and
metrics.jsonl are made durable before the checkpoint gets its name, so they hold at least everything up to s.
What they hold beyond s is discarded on resume; under `determinism = "fast"` only the part that was trained.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from understudy.errors import CheckpointError, TeacherError
from understudy.observability.faults import point
from understudy.observability.metrics import cut_back
from understudy.observability.rundir import RunDir
from understudy.policy.checkpoints.checkpoint import Checkpoint, CheckpointStore
from understudy.policy.checkpoints.state import PolicyState
from understudy.policy.ranks.follow import LeadingPolicy
from understudy.teacher.manifest import Manifest
from understudy.teacher.pool.integrity import check_manifest_unchanged, check_scores_unchanged
from understudy.trainers.critic.local import _MODEL, _OPTIMIZER, critic_state
from understudy.trainers.system import System


def training_state(system: System) -> PolicyState:
    """Student and critic as one state. The critic's tensors are stored with the optimizer's, so an export
    leaves them out."""
    state = system.policy.state()
    if system.critic is None:
        return state
    own = system.critic.state()
    extra: dict[str, torch.Tensor] = {f"{_MODEL}{name}": tensor for name, tensor in own.model.items()}
    extra |= {f"{_OPTIMIZER}{name}": tensor for name, tensor in own.optimizer.items()}
    return replace(
        state,
        optimizer={**state.optimizer, **extra},
        # A run has one random state, the trainer's, even if its critic is in another process.
        progress={**state.progress, "critic": {**own.progress, "random": state.progress["random"]}},
    )


def restore_critic(system: System, state: PolicyState) -> None:
    """Load the critic's part of a state from `training_state`."""
    found: Mapping[str, Any] | None = state.progress.get("critic")
    if (system.critic is None) != (found is None):
        raise CheckpointError(
            f"the checkpoint holds {'no critic' if found is None else 'a critic'}, this recipe has "
            f"{'one' if found is None else 'none'}; resume with the recipe the run was started with"
        )
    if system.critic is not None and found is not None:
        system.critic.load_state(critic_state(state))


def checkpoint_due(system: System, step: int, line: Mapping[str, Any]) -> bool:
    """Whether to save the step just taken, with metrics `line`: it is due by count, the last, or the best so
    far."""
    trainer = system.recipe.trainer
    best = trainer.keep_best and system.best.consider(step, line)
    return best or step % trainer.checkpoint_every == 0 or step == trainer.steps


async def save_checkpoint(system: System, step: int) -> None:
    """Returns when training may continue. `finish_saving` also waits for the disk."""
    await finish_saving(system)
    with system.spans.span("checkpoint", step=step):
        await system.plane.sync()
        system.metrics.sync()
        system.spans.flush()
        extra = {
            "cursor": system.cursor.state(),
            "teachers": system.manifests,
            "rows_trained": system.tally.rows_trained,
        }
        state, beside = await asyncio.to_thread(training_state, system), system.recipe.trainer.async_save
        # Always on the saver's thread: a run that ends meanwhile waits there, so the next attempt finds no
        # writer.
        written = await asyncio.to_thread(partial(system.saver.save, step, state, extra, copied=beside))
        if beside:
            system.saving.add(system.background.create_task(_when_final(system, written), name="checkpoint"))
        else:
            await _when_final(system, written)


async def finish_saving(system: System) -> None:
    """Returns when every checkpoint under way is final and the journal has freed the rows it need not
    keep."""
    while system.saving:
        task = system.saving.pop()
        with (
            system.view.work("waiting for the checkpoint to be written") if not task.done() else nullcontext()
        ):
            await task


async def _when_final(system: System, written: Future[Path]) -> None:
    # Shielded: a cancellation here must not cancel a save that has not begun, or the saver would report that
    # instead of the original error.
    await asyncio.shield(asyncio.wrap_future(written))
    await _let_go(system)


async def _let_go(system: System) -> None:
    """After a checkpoint is final: mark it if it is the best, and free rows that no resume can need."""
    point("sync.after_checkpoint")
    if system.recipe.trainer.keep_best:
        await asyncio.to_thread(system.best.mark, system.checkpoints)
    resumable = system.checkpoints.resumable()
    if resumable:
        await system.plane.settle(resumable[0])


def last_checkpoint(run: RunDir, keep: int) -> Checkpoint | None:
    store = CheckpointStore(run.checkpoints, keep)
    return store.load() if store.steps() else None


def forget_after(run: RunDir, step: int | None) -> None:
    """Truncate metrics and samples to a checkpoint's step (None: to the start)."""
    cut_back(run.metrics, step)
    cut_back(run.samples, step)


async def restore(system: System, checkpoint: Checkpoint) -> None:
    """Load a checkpoint into a newly built system."""
    verify_teachers(checkpoint.extra["teachers"], system.manifests)
    if isinstance(system.policy, LeadingPolicy):
        await asyncio.to_thread(system.policy.load_checkpoint, checkpoint)
    else:
        system.policy.load_state(checkpoint.policy)
    await asyncio.to_thread(restore_critic, system, checkpoint.policy)
    system.cursor.restore(checkpoint.extra["cursor"])
    system.tally.rows_trained = int(checkpoint.extra["rows_trained"])
    # The previous launch may have been killed between the checkpoint and this call.
    await _let_go(system)


def verify_teachers(saved: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises unless a resumed run has the same teachers, by their manifests and their scores of the fixed
    tokens."""
    for name, before in saved.items():
        if name not in now:
            raise CheckpointError(f"teacher {name} of this run is gone; put it back, or start a new run")
        stored, found = (msgspec.convert(one, Manifest) for one in (before, now[name]))
        try:
            check_manifest_unchanged(stored, found)
            check_scores_unchanged(found, before.get("fixed_scores", ()), now[name].get("fixed_scores", ()))
        except TeacherError as error:
            raise CheckpointError(str(error)) from None
