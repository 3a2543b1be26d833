"""Where a run stands, saved and taken up again.

Saving runs beside training (`trainer.async_save`): the state is copied, the copy is written while the next step runs. Only
when a checkpoint is final are the journal's rows let go of, so a kill at any moment finds the last final checkpoint and
everything after it.

A checkpoint of step s holds the policy after s steps and the cursor after s batches. The journal's ledger and
metrics.jsonl hold at least everything up to s (both are made durable before the checkpoint gets its name) and maybe
more; on resume that more is forgotten, under `determinism = "fast"` only as far as it was trained.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from understudy.trainers.system import System


def training_state(system: System) -> PolicyState:
    """Student and critic as one state. The critic's tensors lie with the optimizer's: nobody exports them by accident."""
    state = system.policy.state()
    if system.critic is None:
        return state
    own = system.critic.state()
    extra: dict[str, torch.Tensor] = {f"{_MODEL}{name}": tensor for name, tensor in own.model.items()}
    extra |= {f"{_OPTIMIZER}{name}": tensor for name, tensor in own.optimizer.items()}
    return replace(
        state,
        optimizer={**state.optimizer, **extra},
        # A run has one state of chance, the trainer's, wherever its critic sits.
        progress={**state.progress, "critic": {**own.progress, "random": state.progress["random"]}},
    )


def restore_critic(system: System, state: PolicyState) -> None:
    """Put the critic back from what `training_state` wrote."""
    found: Mapping[str, Any] | None = state.progress.get("critic")
    if (system.critic is None) != (found is None):
        raise CheckpointError(
            f"the checkpoint holds {'no critic' if found is None else 'a critic'}, this recipe has "
            f"{'one' if found is None else 'none'}; resume with the recipe the run was started with"
        )
    if system.critic is not None and found is not None:
        system.critic.load_state(critic_state(state))


def checkpoint_due(system: System, step: int, line: Mapping[str, Any]) -> bool:
    """Whether the step just taken, whose metrics are `line`, is to be saved: by the count, as the last, or as the best."""
    trainer = system.recipe.trainer
    best = trainer.keep_best and system.best.consider(step, line)
    return best or step % trainer.checkpoint_every == 0 or step == trainer.steps


async def save_checkpoint(system: System, step: int) -> None:
    """Returns when training may go on; `finish_saving` waits for the disk as well."""
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
        # Always the saver's thread: a run that ends in the midst of it waits there, so that the next attempt finds nobody writing.
        written = await asyncio.to_thread(partial(system.saver.save, step, state, extra, copied=beside))
        if beside:
            system.saving.add(system.background.create_task(_when_final(system, written), name="checkpoint"))
        else:
            await _when_final(system, written)


async def finish_saving(system: System) -> None:
    """Returns when every checkpoint under way is final and the journal has let go of what it need not keep."""
    while system.saving:
        task = system.saving.pop()
        with (
            system.view.work("waiting for the checkpoint to be written") if not task.done() else nullcontext()
        ):
            await task


async def _when_final(system: System, written: Future[Path]) -> None:
    # Who is cancelled here must not take back a save that has not begun: the saver would tell of that instead of the trouble.
    await asyncio.shield(asyncio.wrap_future(written))
    await _let_go(system)


async def _let_go(system: System) -> None:
    """Once a checkpoint is final: mark it if it is the best, and free what no resume can need."""
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
    """Cut the run's plain files back to a checkpoint (None: to the very start)."""
    cut_back(run.metrics, step)
    cut_back(run.samples, step)


async def restore(system: System, checkpoint: Checkpoint) -> None:
    """Put a freshly built system where the checkpoint stands."""
    verify_teachers(checkpoint.extra["teachers"], system.manifests)
    if isinstance(system.policy, LeadingPolicy):
        await asyncio.to_thread(system.policy.load_checkpoint, checkpoint)
    else:
        system.policy.load_state(checkpoint.policy)
    await asyncio.to_thread(restore_critic, system, checkpoint.policy)
    system.cursor.restore(checkpoint.extra["cursor"])
    system.tally.rows_trained = int(checkpoint.extra["rows_trained"])
    # The launch before may have been killed between the checkpoint and what follows it.
    await _let_go(system)


def verify_teachers(saved: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]]) -> None:
    """A resumed run must be judged by the same teachers: manifests and scores of the fixed tokens tell."""
    for name, before in saved.items():
        if name not in now:
            raise CheckpointError(f"teacher {name} of this run is gone; put it back, or start a new run")
        stored, found = (msgspec.convert(one, Manifest) for one in (before, now[name]))
        try:
            check_manifest_unchanged(stored, found)
            check_scores_unchanged(found, before.get("fixed_scores", ()), now[name].get("fixed_scores", ()))
        except TeacherError as error:
            raise CheckpointError(str(error)) from None
