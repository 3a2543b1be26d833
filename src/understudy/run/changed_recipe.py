"""Which recipe keys may change when a run is resumed, which may not, and why; how far the run is.

Keys may change that set how long to train, what to measure, what to keep on disk, or which processes compute.
Keys that decide what is learnt may not change, because the run's curves would mix two experiments. Imports no
torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from understudy.config import CriticConfig, Recipe, TrainerConfig, parse_recipe
from understudy.config.base import flatten
from understudy.config.paths import resolve_run_paths
from understudy.config.recipe import Overrides, apply_overrides, stored
from understudy.errors import ConfigError
from understudy.observability.redact import HIDDEN, redact
from understudy.observability.report import many
from understudy.observability.rundir import RunDir
from understudy.planning.teacher_checks import own_prompts
from understudy.policy.checkpoints.durable import saved_steps

_ROUNDING = "the same up to rounding"
_SCORED_ALIKE = "who scores, not what: a teacher's weights are compared with those the run began with"
_MEASURED = "what is measured, not what is learnt"
_KEPT = "what is kept on disk"
_WRITTEN_ALIKE = "who generates, not what: seeds belong to the rows"
_REACHED = "where the servers are, not what they serve"
_PACE = "how far rollouts run ahead; rows in flight stay in their windows"
ACCEPTED: Mapping[str, str] = {
    "trainer.steps": "how far the run goes; a schedule that decays does so over the new length from here on",
    "trainer.passes": "how far the run goes",
    "trainer.checkpoint_every": _KEPT,
    "trainer.keep_checkpoints": _KEPT,
    "trainer.keep_best": _KEPT,
    "trainer.async_save": "when the disk is waited for",
    "trainer.eval_every": _MEASURED,
    "trainer.eval_samples": _MEASURED,
    "trainer.eval_k": _MEASURED,
    "trainer.eval_teachers": _MEASURED,
    "trainer.solved_at": _MEASURED,
    "trainer.max_dead_letters": "how many bad rows are put up with",
    "trainer.stall_seconds": "when the run says that it is stuck",
    "trainer.max_staleness": _PACE,
    "trainer.adapt_admission": _PACE,
    "trainer.partial_rollouts": "what a publish waits for; every token keeps the version that wrote it",
    "trainer.ranks": _ROUNDING,
    "trainer.micro_batch_tokens": _ROUNDING,
    "trainer.offload_optimizer": "where the optimizer's state lives",
    "student.device": _ROUNDING,
    "student.gradient_checkpointing": _ROUNDING,
    "student.compile": _ROUNDING,
    "student.attention": _ROUNDING,
    "student.lora.publish": "how weights travel to the engines",
    "critic.process": "where the critic sits",
    "critic.device": _ROUNDING,
    "critic.attention": _ROUNDING,
    "loss.backend": _ROUNDING,
    "rollout.max_batch": _ROUNDING,
    "rollout.replicas": _WRITTEN_ALIKE,
    "rollout.processes": _WRITTEN_ALIKE,
    "rollout.workers": _WRITTEN_ALIKE,
    "rollout.devices": _WRITTEN_ALIKE,
    "rollout.vllm_python": _WRITTEN_ALIKE,
    "rollout.urls": _REACHED,
    "rollout.token_env": _REACHED,
    "rollout.served_model": _REACHED,
    "rollout.snapshots": _REACHED,
    "rollout.deadline_seconds": "how long one sample is waited for",
    "teachers.*.replicas": _SCORED_ALIKE,
    "teachers.*.placement": _SCORED_ALIKE,
    "teachers.*.pool": _SCORED_ALIKE,
    "teachers.*.urls": _SCORED_ALIKE,
    "teachers.*.backend": _SCORED_ALIKE,
    "teachers.*.vllm_python": _SCORED_ALIKE,
    "teachers.*.engine_args": _SCORED_ALIKE,
    "teachers.*.offload": _SCORED_ALIKE,
    "teachers.*.ports": _SCORED_ALIKE,
    "teachers.*.token_env": _SCORED_ALIKE,
    "teachers.*.tensor_parallel": _SCORED_ALIKE,
    "teachers.*.compile": _ROUNDING,
    "teachers.*.attention": _ROUNDING,
    "teachers.*.device": _ROUNDING,
    "teachers.*.threads": _ROUNDING,
    "teachers.*.max_batch_tokens": _ROUNDING,
    "teachers.*.deadline_seconds": "how long a replica is waited for",
    "teachers.*.outage_seconds": "how long servers are waited for",
    "teachers.*.hedge_after_seconds": "how long a replica is waited for",
    "teachers.*.cache_bytes": "how much memory scores take",
    "dataplane.*": "how much memory rows take",
    "cluster.*": "where processes sit",
    "run.threads": _ROUNDING,
    "run.mps": "how processes share a GPU",
    "run.loggers": "who else is told",
    "run.rollout_dump_every": "what is written for people to read",
    "run.profile_steps": "what is written for people to read",
    "run.keep_rows": "what is kept for people to read",
    "run.name": "a name",
    "run.note": "words for a reader",
    "run.python_path": "where code lies",
}
"""Keys that may change, each with the reason. `*` stands for any name."""


ONLY_MORE: Mapping[str, str] = {
    "trainer.max_staleness": "rows in flight may be further behind than the new bound allows",
    "dataplane.max_rows": "rows in flight may be further ahead than the new bound has room for",
}
"""Accepted keys that may not be lowered in a fully async run, because rows in the journal were written under
the larger value."""


REFUSED: Mapping[str, str] = {
    "run.seed": "every sample's randomness derives from it",
    "run.determinism": "the rows in the journal were composed under the old rule",
    "run.dir": "a run stays in its folder; move the folder and resume it there",
    "student": "a run trains one model",
    "teachers": "the rows trained so far were scored by the old teachers",
    "loss": "the steps taken so far learnt from another objective",
    "critic": "the critic in the checkpoint was trained under the old value",
    "reference": "the steps taken so far were kept near another model",
    "rollout.engine": "another engine writes other rows from the same seeds",
    "rollout.engine_args": "they may change what vLLM writes",
    "rollout.live_weights": "the rows trained so far were written by other weights",
    "rollout.max_refills": "which prompts are trained depends on it",
    "rollout": "the rows trained so far were written under other rules",
    "data.eval": "accuracies before and after could not be compared",
    "data.reward": "rewards before and after could not be compared",
    "data": "the place in the data is counted in the old data",
    "trainer.batch_size": "the place in the data is counted in batches of the old size",
    "trainer.sync_every": "rows in flight belong to windows of batch_size · sync_every prompts",
    "trainer.solved_at": "a teacher's prompt shows `session.solution`, an attempt that reached the old value",
    "trainer.mode": "the two schedules hold different rows in the journal",
    "trainer": "the optimizer's state and the curves so far belong to the old value",
}
"""Why all other keys may not change, by the longest matching prefix."""


_PLACES = ("*.model", "data.train", "data.eval")
"""Keys whose files a user may have moved or renamed since the run began."""


@dataclass(frozen=True, slots=True)
class Change:
    """An accepted change of one recipe key, and why it is accepted."""

    key: str
    before: Any
    after: Any
    reason: str

    def __str__(self) -> str:
        if self.before is None:
            return f"{self.key} = {_shown(self.key, self.after)} ({self.reason})"
        return f"{self.key}: {_shown(self.key, self.before)} → {_shown(self.key, self.after)} ({self.reason})"


def changed_recipe(run: RunDir, overrides: Overrides) -> tuple[Recipe, list[Change]]:
    """The run's recipe with overrides, and the differences. `ConfigError` if one of them may not change."""
    table = stored(run.read_recipe())
    before = parse_recipe(table)
    if overrides:
        apply_overrides(table, overrides)
        resolve_run_paths(table, Path.cwd())
    run.check_restored(table)
    if not overrides:
        return before, []
    after = parse_recipe(table)
    changes = compare(before, after)
    if after.trainer.passes is None:
        refuse_shorter(run, after.trainer)
    return after, changes


def last_checkpoint_step(run: RunDir) -> int:
    return max(saved_steps(run.checkpoints), default=0)


def refuse_shorter(run: RunDir, trainer: TrainerConfig, rows: int = 0) -> None:
    """`ConfigError` if the run has taken more steps than this length has; `passes` are counted over `rows`."""
    saved = last_checkpoint_step(run)
    if saved <= trainer.steps_over(rows):
        return
    length = trainer.length_note(rows) or f"trainer.steps = {trainer.steps}"
    counted = "steps" if trainer.passes is None else "passes"
    raise ConfigError(
        f"{length}: {run.path} has taken {many(saved, 'step')} already; {counted} are counted from the start of the run, so give "
        f"more, or leave trainer.{counted} out"
    )


def refuse_cut_window(run: RunDir, before: TrainerConfig, after: TrainerConfig, rows: int) -> None:
    """`ConfigError` if a window of a fully async run would get other updates than its rows were written for: the old length
    ended inside a window that was trained, or the new one ends inside a window whose rows may be under way. `passes` are
    counted over `rows`."""
    every, old, new = after.sync_every, before.steps_over(rows), after.steps_over(rows)
    saved = last_checkpoint_step(run)
    raised = new > old == saved and old % every
    lowered = saved < new < old and new % every
    if after.mode == "fully_async" and (raised or lowered):
        below = new // every * every
        hint = (
            "start a new run from its export (`understudy export`)"
            if raised
            else f"give {below + every} steps" + (f" or {below}" if below > saved else "")
        )
        raise ConfigError(
            f"a length of {new} steps: {run.path} {'ended' if raised else 'would end'} at step {old if raised else new}, inside a window of "
            f"trainer.sync_every = {every} updates, whose rows were taken for {'that end' if raised else 'all of them'}; {hint}"
        )


def compare(before: Recipe, after: Recipe) -> list[Change]:
    """All differences, if all are accepted. Otherwise raises with every one that is not."""
    old, new = flatten(_tables(before)), flatten(_tables(after))
    accepted, problems = [], []
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) == new.get(key):
            continue
        if (
            key == "trainer.steps" and after.trainer.passes is not None
        ):  # computed from the rows when they are read
            continue
        reason = None if key == "trainer.solved_at" and _solutions_are_shown(after) else _accepted(key)
        if key == "trainer.passes":
            reason = f"{reason}; in place of trainer.steps = {old['trainer.steps']}"
        lowered = after.trainer.mode == "fully_async" and key in ONLY_MORE and new[key] < old[key]
        if reason is not None and not lowered:
            accepted.append(Change(key, old.get(key), new.get(key), reason))
        else:
            why = f"{ONLY_MORE[key]}; it may only be raised, or" if lowered else f"{_refused(key)};"
            moved = any(fnmatchcase(key, pattern) for pattern in _PLACES)
            link = (
                ", or, if it is the same in another place, put a symbolic link at the old one"
                if moved
                else ""
            )
            problems.append(
                f"cannot resume with {key} = {_shown(key, new.get(key))}, the run has {_shown(key, old.get(key))}: {why} "
                f"start a new run with `understudy train`{link}"
            )
    if problems:
        raise ConfigError(problems)
    return accepted


def _tables(recipe: Recipe) -> dict[str, Any]:
    """The recipe's tables, with the defaults of a critic that it does not mention: `critic.device` alone is
    then one change."""
    table = recipe.model_dump()
    if recipe.loss.advantage == "gae" and recipe.critic is None:
        table["critic"] = CriticConfig().model_dump()
    return table


def _solutions_are_shown(recipe: Recipe) -> bool:
    return any("solution" in prompt.session_facts for prompt in own_prompts(recipe.teachers).values())


def _accepted(key: str) -> str | None:
    return next((reason for pattern, reason in ACCEPTED.items() if fnmatchcase(key, pattern)), None)


def _refused(key: str) -> str:
    fitting = [prefix for prefix in REFUSED if key == prefix or key.startswith(f"{prefix}.")]
    return REFUSED[max(fitting, key=len)] if fitting else "it would change what the run means"


def _shown(key: str, value: Any) -> str:
    name = key.rpartition(".")[2]
    shown = redact({name: value})[name]
    return "not set" if value is None else HIDDEN if shown == HIDDEN else repr(shown)
