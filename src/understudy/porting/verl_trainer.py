"""Optimizer, checkpoints, evaluation and names of a verl configuration."""

from __future__ import annotations

from understudy.porting.recipe_draft import Draft, expanded
from understudy.porting.verl_schedule import VerlSchedule, batches, length

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_LOGGERS = ("tensorboard", "wandb", "trackio", "mlflow")
_SCHEDULES = ("constant", "cosine", "linear")


def trainer(draft: Draft, schedule: VerlSchedule, whole: bool) -> None:
    """`whole`: a batch is one update."""
    batch, updates = batches(draft, schedule, whole)
    steps = length(draft, batch, updates)
    draft.put("trainer.epochs", draft.get(f"{_ACTOR}.ppo_epochs", 1), f"{_ACTOR}.ppo_epochs")
    _optimizer(draft, steps)
    if draft.get(f"{_ACTOR}.ppo_max_token_len_per_gpu") is not None:
        tokens = f"{_ACTOR}.ppo_max_token_len_per_gpu"
        draft.put("trainer.micro_batch_tokens", draft.get(tokens), tokens)
    ends = (".optimizer_offload", ".optimizer_cpu_offload")
    offload = [key for key in draft.given if key.startswith(f"{_ACTOR}.") and key.endswith(ends)]
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
    _decay(draft)
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


def _decay(draft: Draft) -> None:
    """The key and its default depend on verl's engine."""
    optim, engine = f"{_ACTOR}.optim", str(draft.get("model_engine", draft.get(f"{_ACTOR}.strategy", "fsdp")))
    usual = {"veomni": ("lr_scheduler_type", "cosine"), "torchtitan": ("decay_type", "linear"),
             "megatron": ("lr_decay_style", "constant")}.get(engine, ("lr_scheduler_type", "constant"))  # fmt: skip
    names = (usual[0], "lr_scheduler_type", "lr_decay_style", "decay_type")
    key = next(
        (f"{optim}.{name}" for name in names if draft.get(f"{optim}.{name}") is not None),
        f"{optim}.{usual[0]}",
    )
    kind = draft.get(key, usual[1])
    if kind in _SCHEDULES:
        draft.put("trainer.schedule", kind, key)
    else:
        draft.unsupported(key, f"trainer.schedule is one of {', '.join(_SCHEDULES)}")
    for name in names:
        draft.not_needed(f"{optim}.{name}", f"{key} counts")
    for name in ("min_lr_ratio", "min_lr", "lr_min", "min_lr_factor"):
        if kind == "constant":
            draft.not_needed(f"{optim}.{name}", "the learning rate does not fall")


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
            "a run with data.eval and data.reward always evaluates before its first step",
        )
    samples = draft.get("data.val_max_samples", -1)
    if samples > 0 and can_evaluate:
        draft.put("trainer.eval_samples", samples, "data.val_max_samples")
    draft.not_needed("data.val_max_samples", "all held-out problems are taken")
    own = f"{_ROLLOUT}.val_kwargs"
    k, sampled = draft.get(f"{own}.n", 1), bool(draft.get(f"{own}.do_sample", False))
    if can_evaluate and (k > 1 or sampled):
        draft.put("trainer.eval_k", k, f"{own}.n", f"{own}.do_sample")
    for name, usual in (("temperature", 0.0), ("top_p", 1.0), ("top_k", -1)):
        of_rollouts = draft.get(f"{_ROLLOUT}.{name}", 1.0 if name == "temperature" else usual)
        if sampled and draft.get(f"{own}.{name}", usual) != of_rollouts:
            draft.unsupported(
                f"{own}.{name}",
                f"held-out answers are greedy, and those of trainer.eval_k sampled as rollouts are (rollout.{name})",
            )


def _names(draft: Draft) -> None:
    if draft.get("trainer.experiment_name") is not None:
        draft.put("run.name", str(draft.get("trainer.experiment_name")), "trainer.experiment_name")
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
