"""Whether the rows of a window fit the data plane, and how far ahead producers may run.

A prompt in flight counts as `rollout.n` rows. One whole window must fit, or no update could ever get its
rows. The room beyond it is how far ahead producers run, even if `trainer.max_staleness` allows more.
"""

from __future__ import annotations

from understudy.config.rollout import RolloutConfig
from understudy.config.trainer import DataPlaneConfig, TrainerConfig


def capacity_problems(
    trainer: TrainerConfig, rollout: RolloutConfig, dataplane: DataPlaneConfig
) -> list[str]:
    rows = window_rows(trainer, rollout)
    if rows <= dataplane.max_rows:
        return []
    every = f" × trainer.sync_every = {trainer.sync_every}" if trainer.sync_every > 1 else ""
    return [
        f"dataplane.max_rows = {dataplane.max_rows} does not hold the {rows} rows the student is trained on between two publishes "
        f"(trainer.batch_size = {trainer.batch_size} × rollout.n = {rollout.n}{every}): raise dataplane.max_rows to {rows} or more"
    ]


def capacity_notes(trainer: TrainerConfig, rollout: RolloutConfig, dataplane: DataPlaneConfig) -> list[str]:
    """A note if `dataplane.max_rows` keeps a fully async run below its `trainer.max_staleness`."""
    rows = window_rows(trainer, rollout)
    wanted = int((1 + trainer.max_staleness) * rows + 1e-9)
    if trainer.mode == "sync" or wanted <= dataplane.max_rows:
        return []
    ahead = max_prompts(rollout, dataplane) * rollout.n / rows - 1
    return [
        f"dataplane.max_rows = {dataplane.max_rows} lets producers run {ahead:.2g} of a window ahead, not the "
        f"{trainer.max_staleness:g} that trainer.max_staleness allows; that takes dataplane.max_rows = {wanted}"
    ]


def max_prompts(rollout: RolloutConfig, dataplane: DataPlaneConfig) -> int:
    """Prompts in flight at most, each with all its sessions."""
    return dataplane.max_rows // rollout.n


def window_rows(trainer: TrainerConfig, rollout: RolloutConfig) -> int:
    """Rows that the updates between two publishes train on, one per session."""
    return trainer.batch_size * min(trainer.sync_every, trainer.steps) * rollout.n
