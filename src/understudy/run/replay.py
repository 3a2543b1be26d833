"""Runs the rows of a refused step again, one by one (`understudy replay`).

refused/step-….safetensors ─┬─> loss and gradient of each row ──> the rows that are not finite
the checkpoint of that step ─┘
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from understudy.assembly.build import load_student_of, objective_of, policy_settings, steady_torch
from understudy.assembly.critic import critic_of
from understudy.assembly.usable_ids import kept_usable_ids
from understudy.config import Recipe, parse_recipe
from understudy.errors import DataError
from understudy.observability.rundir import RunDir, read_json
from understudy.policy.bad_rows import RowFinding, replay
from understudy.policy.checkpoints.checkpoint import Checkpoint, CheckpointStore
from understudy.policy.forward.forward import Objective
from understudy.policy.policy import Policy
from understudy.policy.refused import RefusedRows
from understudy.trainers.critic.local import critic_state


@dataclass(frozen=True, slots=True)
class Replay:
    """The findings on the rows of one refused step."""

    refused: RefusedRows
    role: str
    weights_of: int
    """The step whose weights were used: the refused step's, or the last checkpoint before it."""
    findings: list[RowFinding]

    @property
    def same_weights(self) -> bool:
        return self.weights_of == self.refused.step


def replay_run(path: Path, step: int | None = None) -> Replay:
    """Replays the rows last refused in the run at `path`, or those refused after `step` steps, under the
    weights of that step or of the last checkpoint before it."""
    run = RunDir.open(path)
    refused, about = RefusedRows.load(_file(run, step))
    recipe = parse_recipe(read_json(run.recipe))
    steady_torch(recipe)
    store = CheckpointStore(run.checkpoints, recipe.trainer.keep_checkpoints)
    earlier = [saved for saved in store.steps() if saved <= refused.step]
    policy, objective = _learner(run, recipe, about["role"], store.load(max(earlier)) if earlier else None)
    findings = replay(policy, refused, objective)
    return Replay(refused, about["role"], max(earlier, default=0), findings)


def _file(run: RunDir, step: int | None) -> Path:
    wanted = "step-*.safetensors" if step is None else f"step-{step:06d}-*.safetensors"
    files = sorted(run.refused_rows.glob(wanted)) if run.refused_rows.is_dir() else []
    if not files:
        which = "no step" if step is None else f"no step after {step} others"
        raise DataError(
            f"{run.path}: {which} was refused; {run.refused_rows} holds the rows of those that were"
        )
    return files[-1]


def _learner(
    run: RunDir, recipe: Recipe, role: str, checkpoint: Checkpoint | None
) -> tuple[Policy, Objective]:
    """The model that refused the rows (student or critic), with a checkpoint's weights or the initial
    ones."""
    if role == "critic":
        critic = critic_of(recipe, None)
        assert critic is not None
        if checkpoint is not None:
            critic.policy.load_state(critic_state(checkpoint.policy))
        return critic.policy, critic.objective
    policy = Policy(load_student_of(recipe).model, policy_settings(recipe, kept_usable_ids(run)))
    if checkpoint is not None:
        policy.load_state(checkpoint.policy)
    return policy, objective_of(recipe)
