"""A process that saves checkpoints until it is killed."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection

import torch

from understudy.policy.checkpoints.checkpoint import CheckpointStore
from understudy.policy.checkpoints.state import PolicyState

ELEMENTS = 40_000


def state_of(step: int) -> PolicyState:
    """A state whose numbers all follow from the step, so that a mixture of two saves is detected."""
    weight = torch.arange(ELEMENTS, dtype=torch.float32) + step
    return PolicyState(
        {"weight": weight},
        {"exp_avg/weight": -weight, "step/weight": torch.tensor(float(step))},
        {"step": step},
    )


def save_until_killed(root: str, fault: str, acknowledged: Connection) -> None:
    """Saves step 1, 2, 3 …, and reports each one only after `save` has returned."""
    os.environ["UNDERSTUDY_FAULT"] = fault
    torch.set_num_threads(1)
    store = CheckpointStore(root)
    store.recover()
    step = store.latest() or 0
    while True:
        step += 1
        store.save(step, state_of(step), {"cursor": step})
        acknowledged.send(step)
