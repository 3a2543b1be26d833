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
import logging
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from understudy.dataplane.journal.schema import FILE_NAME
from understudy.dataplane.ledger import Ledger
from understudy.errors import CallbackError, CheckpointError, TeacherError
from understudy.observability.faults import point
from understudy.observability.metrics import cut_back
from understudy.observability.rundir import RunDir
from understudy.policy.checkpoints.checkpoint import Checkpoint, CheckpointStore
from understudy.policy.checkpoints.state import PolicyState
from understudy.policy.ranks.follow import LeadingPolicy
from understudy.teacher.manifest import Manifest
from understudy.teacher.pool.integrity import check_manifest_unchanged, check_scores_unchanged
from understudy.trainers.critic.local import critic_state, critic_tensors
from understudy.trainers.system import Learner, RunState, System

logger = logging.getLogger(__name__)


def training_state(learner: Learner) -> PolicyState:
    """Student and critic as one state. The critic's tensors are stored with the optimizer's, so an export
    leaves them out."""
    state = learner.policy.state()
    if learner.critic is None:
        return state
    own = learner.critic.state()
    return replace(
        state,
        optimizer={**state.optimizer, **critic_tensors(own)},
        # A run has one random state, the trainer's, even if its critic is in another process.
        progress={**state.progress, "critic": {**own.progress, "random": state.progress["random"]}},
    )


def restore_critic(learner: Learner, state: PolicyState) -> None:
    """Load the critic's part of a state from `training_state`."""
    found: Mapping[str, Any] | None = state.progress.get("critic")
    if (learner.critic is None) != (found is None):
        raise CheckpointError(
            f"the checkpoint holds {'no critic' if found is None else 'a critic'}, this recipe has "
            f"{'one' if found is None else 'none'}; resume with the recipe the run was started with"
        )
    if learner.critic is not None and found is not None:
        learner.critic.load_state(critic_state(state))


def checkpoint_due(system: System, step: int, line: Mapping[str, Any]) -> bool:
    """Whether to save the step just taken, with metrics `line`: it is due by count, the last, or the best so
    far."""
    trainer = system.learner.settings.trainer
    best = trainer.keep_best and system.state.saves.best.consider(step, line)
    return best or step % trainer.checkpoint_every == 0 or step == trainer.steps


async def record_step(system: System, step: int, line: Mapping[str, Any]) -> None:
    """Writes and shows a step's metrics, and calls the callbacks. If one raises, the step is saved first."""
    state = system.state
    written = state.metrics.write(step, line)
    state.view.step(written)
    if state.callbacks is None:
        return
    try:
        await state.callbacks.step(step, written)
    except CallbackError as error:
        if step > 0:
            await save_despite(system, step, error)
        raise


async def save_despite(system: System, step: int, error: Exception) -> None:
    """Saves a step that was taken before `error`, which the caller raises."""
    try:
        await save_checkpoint(system, step)
        await finish_saving(system.state)
    except Exception:
        logger.exception("step %d could not be saved after: %s", step, error)
    else:
        system.state.view.note(f"step {step} itself is saved")


async def save_checkpoint(system: System, step: int) -> None:
    """Returns when training may continue. `finish_saving` also waits for the disk."""
    kept, trainer = system.state, system.learner.settings.trainer
    with kept.spans.span("checkpoint", step=step):
        await finish_saving(kept)
        try:
            await kept.plane.sync()
            kept.metrics.sync()
            kept.spans.flush()
        except OSError as error:
            raise CheckpointError(
                f"could not save the checkpoint of step {step}: a file of {kept.run.path} cannot be flushed: {error}; the "
                "previous checkpoints are intact, free some space or mend the disk, then resume"
            ) from error
        extra = {
            "cursor": system.producer.cursor.state(),
            "teachers": system.producer.teachers.manifests(),
            "rows_trained": kept.tally.rows_trained,
        }
        state = await asyncio.to_thread(training_state, system.learner)
        # Always on the saver's thread: a run that ends meanwhile waits there, so the next attempt finds no
        # writer.
        save = partial(kept.saves.saver.save, step, state, extra, copied=trainer.async_save)
        written = await asyncio.to_thread(save)
        final = _when_final(kept, step, written, keep_best=trainer.keep_best)
        if trainer.async_save:
            kept.saves.under_way.add(kept.background.create_task(final, name="checkpoint"))
        else:
            await final


async def finish_saving(state: RunState) -> None:
    """Returns when every checkpoint under way is final and the journal has freed the rows it need not
    keep."""
    while state.saves.under_way:
        task = state.saves.under_way.pop()
        waiting = state.view.work("waiting for the checkpoint to be written")
        with nullcontext() if task.done() else waiting:
            await task


async def _when_final(state: RunState, step: int, written: Future[Path], *, keep_best: bool) -> None:
    # Shielded: a cancellation here must not cancel a save that has not begun, or the saver would report that
    # instead of the original error.
    path = await asyncio.shield(asyncio.wrap_future(written))
    await _mark_and_free(state, keep_best=keep_best)
    if state.callbacks is not None:
        await state.callbacks.checkpoint(step, path, keep_best and state.saves.best.step == step)


async def _mark_and_free(state: RunState, *, keep_best: bool) -> None:
    """After a checkpoint is final: mark it if it is the best, and free rows that no resume can need."""
    point("sync.after_checkpoint")
    if keep_best:
        await asyncio.to_thread(state.saves.best.mark, state.saves.store)
    resumable = state.saves.store.resumable()
    if resumable:
        await state.plane.settle(resumable[0])


def last_checkpoint(run: RunDir, keep: int) -> Checkpoint | None:
    """The newest checkpoint that verifies; damaged ones after it are removed. Raises, and removes nothing, if the journal no longer
    has the rows to go on from it. Only the run's one writer may call it."""
    store = CheckpointStore(run.checkpoints, keep)
    if not store.steps():
        return None
    checkpoint = store.load()
    journal = run.dataplane / FILE_NAME
    settled = Ledger(journal).settled() if journal.exists() else -1
    # The second condition sees damaged checkpoints that are still there. If an earlier resume has removed them, only
    # the journal (`settled`) shows that rows were deleted for them.
    if checkpoint.step < settled or checkpoint.step not in store.resumable():
        damaged = f" ({'; '.join(checkpoint.skipped)})" if checkpoint.skipped else ""
        raise CheckpointError(
            f"{run.path} has no checkpoint to go on from{damaged}. That of step {checkpoint.step} is whole, but the rows after it "
            "are deleted: put back a copy of a later one, or start a new run from an export of it (`understudy export`)"
        )
    if checkpoint.skipped:
        try:
            store.remove_after(checkpoint.step)
        except OSError as error:
            logger.warning("a damaged checkpoint in %s could not be removed: %s", store.root, error)
    return checkpoint


def forget_after(run: RunDir, step: int | None) -> None:
    """Truncate metrics and samples to a checkpoint's step (None: to the start)."""
    cut_back(run.metrics, step)
    cut_back(run.samples, step)


async def restore(system: System, checkpoint: Checkpoint) -> None:
    """Load a checkpoint into a newly built system."""
    verify_teachers(checkpoint.extra["teachers"], system.producer.teachers.manifests())
    if isinstance(system.learner.policy, LeadingPolicy):
        await asyncio.to_thread(system.learner.policy.load_checkpoint, checkpoint)
    else:
        system.learner.policy.load_state(checkpoint.policy)
    await asyncio.to_thread(restore_critic, system.learner, checkpoint.policy)
    system.producer.cursor.restore(checkpoint.extra["cursor"])
    system.state.tally.rows_trained = int(checkpoint.extra["rows_trained"])
    # The previous launch may have been killed between the checkpoint and this call.
    await _mark_and_free(system.state, keep_best=system.learner.settings.trainer.keep_best)


def verify_teachers(saved: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises unless a resumed run has the same teachers, by their manifests and their scores of the fixed
    tokens."""
    for name, before in saved.items():
        if name not in now:
            raise CheckpointError(f"teacher {name} of this run is gone; put it back, or start a new run")
        stored, found = (msgspec.convert(one, Manifest) for one in (before, now[name]))
        if stored.version >= 0:
            continue  # it takes the student's weights once they are restored: `verify_followers`
        try:
            check_manifest_unchanged(stored, found)
            check_scores_unchanged(found, before.get("fixed_scores", ()), now[name].get("fixed_scores", ()))
        except TeacherError as error:
            raise CheckpointError(str(error)) from None


def verify_followers(saved: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]]) -> None:
    """After a resume has published: raises unless each teacher that follows the student has the weights that
    the checkpoint names. Not compared if it is now another version: a resume publishes inside a window."""
    for name, before in saved.items():
        stored, found = (msgspec.convert(one, Manifest) for one in (before, now[name]))
        if stored.version < 0 or stored.version != found.version:
            continue
        try:
            check_manifest_unchanged(stored, found)
        except TeacherError as error:
            raise CheckpointError(str(error)) from None
