"""Schedule, optimizer, evaluation and names of a verl configuration."""

from __future__ import annotations

from understudy.porting.recipe_draft import Draft, expanded

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_LOGGERS = ("tensorboard", "wandb", "trackio", "mlflow")
_SCHEDULES = ("constant", "cosine", "linear")


def trainer(draft: Draft, fully_async: bool) -> None:
    """verl's asynchronous trainers count steps in publishes, each after `sync_every` updates; a step here is an update."""
    batch, updates = _asynchronous(draft) if fully_async else (_synchronous(draft), 1)
    steps = _length(draft, batch, updates)
    draft.put("trainer.epochs", draft.get(f"{_ACTOR}.ppo_epochs", 1), f"{_ACTOR}.ppo_epochs")
    _optimizer(draft, steps)
    if draft.get(f"{_ACTOR}.ppo_max_token_len_per_gpu") is not None:
        tokens = f"{_ACTOR}.ppo_max_token_len_per_gpu"
        draft.put("trainer.micro_batch_tokens", draft.get(tokens), tokens)
    offload = [
        key for key in draft.given if key.startswith(f"{_ACTOR}.") and key.endswith(".optimizer_offload")
    ]
    if any(draft.given[key] for key in offload):
        draft.put("trainer.offload_optimizer", True, *offload)
    if draft.get("trainer.save_freq", -1) > 0:
        draft.put("trainer.checkpoint_every", draft.get("trainer.save_freq") * updates, "trainer.save_freq")
    draft.unsupported("trainer.save_freq", "checkpoints cannot be turned off; trainer.checkpoint_every is 50")
    kept = draft.get("trainer.max_actor_ckpt_to_keep")
    if kept is not None:
        draft.put("trainer.keep_checkpoints", max(kept, 2), "trainer.max_actor_ckpt_to_keep")
    else:
        draft.notes.append(
            "verl keeps every checkpoint; here the newest 2 and the best are kept (trainer.keep_checkpoints)"
        )
    _evaluation(draft, updates)
    _names(draft)


def _optimizer(draft: Draft, steps: int | None) -> None:
    optim = f"{_ACTOR}.optim"
    draft.put("trainer.learning_rate", float(draft.get(f"{optim}.lr", 1e-6)), f"{optim}.lr")
    draft.put(
        "trainer.weight_decay", float(draft.get(f"{optim}.weight_decay", 0.01)), f"{optim}.weight_decay"
    )
    clip = next(
        (key for key in (f"{_ACTOR}.grad_clip", f"{optim}.clip_grad") if draft.get(key) is not None),
        f"{_ACTOR}.grad_clip",
    )
    draft.put("trainer.grad_clip", float(draft.get(clip, 1.0)), clip)
    draft.not_needed(f"{optim}.clip_grad", "actor.grad_clip counts")
    schedule = draft.get(f"{optim}.lr_scheduler_type", "constant")
    if schedule in _SCHEDULES:
        draft.put("trainer.schedule", schedule, f"{optim}.lr_scheduler_type")
    else:
        draft.unsupported(f"{optim}.lr_scheduler_type", f"trainer.schedule is one of {', '.join(_SCHEDULES)}")
    warmup, share = (
        draft.get(f"{optim}.lr_warmup_steps", -1),
        draft.get(f"{optim}.lr_warmup_steps_ratio", 0.0),
    )
    if warmup > 0:
        draft.put("trainer.warmup_steps", warmup, f"{optim}.lr_warmup_steps")
    elif share > 0 and steps is not None:
        draft.put("trainer.warmup_steps", int(share * steps), f"{optim}.lr_warmup_steps_ratio")
    elif share > 0:
        draft.unsupported(
            f"{optim}.lr_warmup_steps_ratio",
            "trainer.warmup_steps counts steps: `understudy check` says how many the run has",
        )
    for key in ("lr_warmup_steps", "lr_warmup_steps_ratio"):
        draft.not_needed(f"{optim}.{key}", "no warm-up is the default")


def _evaluation(draft: Draft, updates: int) -> None:
    can_evaluate = "reward" in draft.tables.get("data", {}) and "eval" in draft.tables.get("data", {})
    # Earlier releases of its fully asynchronous trainer read rollout.test_freq.
    now, earlier = "trainer.test_freq", "rollout.test_freq"
    key = earlier if draft.get(now) is None and draft.get(earlier) is not None else now
    every = max(draft.get(key, -1), 0) * updates
    if can_evaluate or not every:
        draft.put("trainer.eval_every", every, key)
    else:
        draft.unsupported(key, f"set data.eval and data.reward, then trainer.eval_every = {every}")
    draft.not_needed(earlier, f"{now} counts")
    if draft.get("trainer.val_before_train", True):
        draft.not_needed("trainer.val_before_train", "a run evaluates before its first step")
    else:
        draft.unsupported(
            "trainer.val_before_train",
            "a run with data.eval and data.reward evaluates before its first step always",
        )
    samples = draft.get("data.val_max_samples", -1)
    if samples > 0 and can_evaluate:
        draft.put("trainer.eval_samples", samples, "data.val_max_samples")
    draft.not_needed("data.val_max_samples", "all held-out problems are taken")
    k = draft.get(f"{_ROLLOUT}.val_kwargs.n", 1)
    if can_evaluate and (k > 1 or draft.get(f"{_ROLLOUT}.val_kwargs.do_sample", False)):
        draft.put("trainer.eval_k", k, f"{_ROLLOUT}.val_kwargs.n")


def _names(draft: Draft) -> None:
    if draft.get("trainer.experiment_name") is not None:
        draft.put("run.name", draft.get("trainer.experiment_name"), "trainer.experiment_name")
    if draft.get("trainer.default_local_dir") is not None:
        draft.put("run.dir", expanded(draft.get("trainer.default_local_dir")), "trainer.default_local_dir")
    if draft.get("trainer.rollout_data_dir") is not None:
        draft.put("run.rollout_dump_every", 1, "trainer.rollout_data_dir")
    loggers = draft.get("trainer.logger")
    if loggers is None:
        draft.notes.append("verl logs to wandb by default; here that is run.loggers = ['wandb']")
        return
    named = [loggers] if isinstance(loggers, str) else list(loggers)
    draft.put("run.loggers", [name for name in named if name in _LOGGERS], "trainer.logger")
    other = [name for name in named if name not in (*_LOGGERS, "console", "file")]
    if other:
        draft.notes.append(
            f"no logger {', '.join(other)}; there are {', '.join(_LOGGERS)}, and metrics.jsonl always"
        )


def _synchronous(draft: Draft) -> int:
    """Returns the prompts of a batch."""
    batch = draft.get("data.train_batch_size", 1024)
    mini, key = draft.get(f"{_ACTOR}.ppo_mini_batch_size", 256), f"{_ACTOR}.ppo_mini_batch_size"
    draft.put("trainer.batch_size", batch, "data.train_batch_size")
    if mini < batch:
        draft.put("trainer.mini_batch_size", mini, key)
    draft.not_needed(key, "one optimizer step takes the whole batch")
    return int(batch)


def _asynchronous(draft: Draft) -> tuple[int, int]:
    """An update takes ppo_mini_batch_size · require_batches prompts; a publish follows some updates. Returns the
    prompts of an update, and the updates of a publish."""
    mode = draft.get("trainer.v1.trainer_mode")
    if mode is not None:
        draft.put("trainer.mode", "fully_async", "trainer.v1.trainer_mode")
        window, stale, lag = (
            "trainer.v1.separate_async.parameter_sync_step",
            "trainer.v1.sampler.max_off_policy_threshold",
            8.0,
        )
    else:
        draft.follow("trainer.mode", "fully_async", "the configuration has [async_training]")
        window, stale, lag = (
            "async_training.trigger_parameter_sync_step",
            "async_training.staleness_threshold",
            0.1,
        )
    if mode == "colocate_async":  # it publishes after every batch
        batch, updates = _synchronous(draft), 1
        draft.not_needed(window, "trainer_mode is colocate_async")
    else:
        mini, batches = f"{_ACTOR}.ppo_mini_batch_size", "async_training.require_batches"
        batch, updates = draft.get(mini, 256) * draft.get(batches, 1), draft.get(window, 4)
        draft.put("trainer.batch_size", batch, mini, batches)
        draft.not_needed("data.train_batch_size", "an update takes ppo_mini_batch_size prompts")
        draft.put("trainer.sync_every", updates, window)
    draft.put("trainer.max_staleness", float(draft.get(stale, lag)), stale)
    partial = "async_training.partial_rollout"
    draft.put("trainer.partial_rollouts", bool(draft.get(partial, True)), partial)
    return batch, updates


def _length(draft: Draft, batch: int, updates: int) -> int | None:
    samples, steps = draft.get("rollout.total_rollout_steps"), draft.get("trainer.total_training_steps")
    if steps is not None:
        draft.put("trainer.steps", steps * updates, "trainer.total_training_steps")
        draft.not_needed("trainer.total_epochs", "total_training_steps ends the run")
        return int(steps * updates)
    if samples is not None:
        steps = max(samples // batch, 1)
        draft.put("trainer.steps", steps, "rollout.total_rollout_steps")
        draft.not_needed("trainer.total_epochs", "total_rollout_steps ends the run")
        return int(steps)
    draft.put("trainer.passes", float(draft.get("trainer.total_epochs", 30)), "trainer.total_epochs")
    return None
