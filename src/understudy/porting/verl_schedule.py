"""Which schedule a verl configuration runs, and what a step, a batch and the length of the run are in it."""

from __future__ import annotations

from enum import StrEnum

from understudy.porting.recipe_draft import Draft
from understudy.porting.sources import Source

_MINI = "actor_rollout_ref.actor.ppo_mini_batch_size"


class VerlSchedule(StrEnum):
    SYNC = "sync"
    COLOCATE_ASYNC = "colocate_async"
    SEPARATE_ASYNC = "separate_async"
    FULLY_ASYNC = "fully_async"
    ONE_STEP_OFF = "one_step_off"
    TWO_STEP_OFF = "two_step_off"

    @property
    def own_engines(self) -> bool:
        """Engines have GPUs of their own."""
        return self not in (VerlSchedule.SYNC, VerlSchedule.COLOCATE_ASYNC)


def schedule_of(draft: Draft, source: Source) -> VerlSchedule:
    mode, pipeline = draft.get("trainer.v1.trainer_mode"), draft.get("trainer.scheduler")
    if mode in (VerlSchedule.SEPARATE_ASYNC, VerlSchedule.COLOCATE_ASYNC):
        return VerlSchedule(mode)
    if pipeline in (VerlSchedule.ONE_STEP_OFF, VerlSchedule.TWO_STEP_OFF):
        return VerlSchedule(pipeline)
    run = f"{source.program} {source.config}"
    if "one_step_off" in run or "gkd" in run:
        return VerlSchedule.ONE_STEP_OFF
    own = any(key.startswith("async_training.") for key in draft.given)
    return VerlSchedule.FULLY_ASYNC if own or "fully_async" in run else VerlSchedule.SYNC


def batches(draft: Draft, schedule: VerlSchedule, whole: bool) -> tuple[int, int]:
    """The prompts of a step, and the steps of a publish. verl's asynchronous trainers count their steps in publishes,
    each after some updates; a step here is an update there. `whole`: a batch is one update, whatever its mini-batches."""
    if schedule is VerlSchedule.SYNC:
        return _synchronous(draft, whole), 1
    mode = {VerlSchedule.COLOCATE_ASYNC: "trainer.v1.trainer_mode", VerlSchedule.SEPARATE_ASYNC: "trainer.v1.trainer_mode",
            VerlSchedule.FULLY_ASYNC: "its fully asynchronous trainer runs"}.get(schedule, "trainer.scheduler")  # fmt: skip
    if mode in draft.given:
        draft.put("trainer.mode", "fully_async", mode)
    else:
        draft.follow("trainer.mode", "fully_async", mode if " " in mode else f"its {schedule} trainer runs")
    if schedule in (VerlSchedule.ONE_STEP_OFF, VerlSchedule.TWO_STEP_OFF):
        batch = _synchronous(draft, whole)
        behind = 1.0 if schedule is VerlSchedule.ONE_STEP_OFF else 2.0
        draft.put("trainer.max_staleness", behind, "trainer.scheduler")
        draft.follow("trainer.partial_rollouts", False, "a batch is written by one set of weights")
        return batch, 1
    if schedule is VerlSchedule.FULLY_ASYNC:
        batch, updates = _mini_batches(draft, "async_training.trigger_parameter_sync_step")
        stale = "async_training.staleness_threshold"
        draft.put("trainer.max_staleness", float(draft.get(stale, 0.1)), stale)
    elif schedule is VerlSchedule.SEPARATE_ASYNC:
        batch, updates = _mini_batches(draft, "trainer.v1.separate_async.parameter_sync_step")
        _ahead(draft, schedule)
    else:  # it publishes after every batch
        batch, updates = _synchronous(draft, whole), 1
        draft.not_needed("trainer.v1.separate_async.parameter_sync_step", "trainer_mode is colocate_async")
        _ahead(draft, schedule)
    partial = "async_training.partial_rollout"
    draft.put("trainer.partial_rollouts", bool(draft.get(partial, True)), partial)
    return batch, updates


def _ahead(draft: Draft, schedule: VerlSchedule) -> None:
    """verl keeps num_warmup_batches + 1 batches in flight; what is older than max_off_policy_threshold it drops."""
    warm, limit = f"trainer.v1.{schedule}.num_warmup_batches", "trainer.v1.sampler.max_off_policy_threshold"
    behind, oldest = draft.get(warm, 1), draft.get(limit, 8) - 1
    if oldest < behind:
        draft.put("trainer.max_staleness", float(max(oldest, 0)), limit, warm)
    else:
        draft.put("trainer.max_staleness", float(behind), warm)
        draft.not_needed(limit, "no row is older than trainer.max_staleness (num_warmup_batches) publishes")


def _synchronous(draft: Draft, whole: bool) -> int:
    """Returns the prompts of a batch."""
    batch = draft.get("data.train_batch_size", 1024)
    mini, key = draft.get(_MINI, 256), _MINI
    draft.put("trainer.batch_size", batch, "data.train_batch_size")
    if mini < batch and not whole:
        draft.put("trainer.mini_batch_size", mini, key)
    draft.not_needed(key, "one optimizer step takes the whole batch")
    return int(batch)


def _mini_batches(draft: Draft, window: str) -> tuple[int, int]:
    """An update takes ppo_mini_batch_size · require_batches prompts, with an optimizer step for each ppo_mini_batch_size
    of them; a publish follows `window` updates."""
    several = "async_training.require_batches"
    mini, batches = draft.get(_MINI, 256), draft.get(several, 1)
    batch, updates = mini * batches, draft.get(window, 4)
    draft.put("trainer.batch_size", batch, _MINI, several)
    if batches > 1:
        draft.put("trainer.mini_batch_size", mini, _MINI)
    draft.not_needed("data.train_batch_size", "an update takes ppo_mini_batch_size prompts")
    draft.put("trainer.sync_every", updates, window)
    return int(batch), int(updates)


def length(draft: Draft, batch: int, updates: int) -> int | None:
    """The steps of the run, where the configuration says how many."""
    samples, steps = draft.get("rollout.total_rollout_steps"), draft.get("trainer.total_training_steps")
    if steps is not None:
        draft.put("trainer.steps", steps * updates, "trainer.total_training_steps")
        draft.not_needed("rollout.total_rollout_steps", "total_training_steps ends the run")
        draft.not_needed(
            "trainer.total_epochs",
            "total_training_steps ends the run (in verl total_epochs does, where it comes first)",
        )
        return int(steps * updates)
    if samples is not None:
        steps = max(samples // batch, 1)
        draft.put("trainer.steps", steps, "rollout.total_rollout_steps")
        draft.not_needed(
            "trainer.total_epochs",
            "total_rollout_steps ends the run (in verl total_epochs does, where it comes first)",
        )
        return int(steps)
    draft.put("trainer.passes", float(draft.get("trainer.total_epochs", 30)), "trainer.total_epochs")
    return None
