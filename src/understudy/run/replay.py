"""Runs the rows of a refused step again, one by one (`understudy replay`).

refused/step-….safetensors ─┬─> loss and gradient of each row ──> the rows that are not finite
the checkpoint of that step ─┘
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from understudy.assembly.cpu_threads import set_up_torch
from understudy.assembly.critic import critic_of
from understudy.assembly.learner import load_source, objective_of, policy_settings
from understudy.assembly.this_machine import settings_of_run
from understudy.assembly.usable_ids import kept_usable_ids
from understudy.media.store import MediaStore
from understudy.observability.rundir import RunDir
from understudy.planning.resolved import Resolved
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
    refused, about = RefusedRows.load(run.refused_step(step))
    settings = settings_of_run(run)
    set_up_torch(settings.compute)
    store = CheckpointStore(run.checkpoints, settings.learn.trainer.keep_checkpoints)
    earlier = [saved for saved in store.steps() if saved <= refused.step]
    # A critic's weights are stored with the optimizer's state.
    optimizer = about["role"] == "critic"
    checkpoint = store.load(max(earlier), optimizer=optimizer) if earlier else None
    policy, objective = _learner(run, settings, about["role"], checkpoint)
    findings = replay(policy, refused, objective)
    return Replay(refused, about["role"], max(earlier, default=0), findings)


def _learner(
    run: RunDir, settings: Resolved, role: str, checkpoint: Checkpoint | None
) -> tuple[Policy, Objective]:
    """The model that refused the rows (student or critic), with a checkpoint's weights or the initial
    ones."""
    if role == "critic":
        assert settings.critic is not None
        critic = critic_of(settings.critic, None)
        if checkpoint is not None:
            critic.policy.load_state(critic_state(checkpoint.policy))
        return critic.policy, critic.objective
    source = settings.student
    student = load_source(source).with_pictures(MediaStore(run.media), source.model, source.revision)
    own = policy_settings(settings.learn, kept_usable_ids(run))
    policy = Policy(student.model, own, pictures=student.pictures)
    if checkpoint is not None:
        policy.load_weights(checkpoint.policy.model)
    return policy, objective_of(settings.learn.loss)
