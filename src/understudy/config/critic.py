"""`[critic]` and `[reference]`: two more models a policy gradient may want."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from understudy.config.base import Section
from understudy.config.devices import Device
from understudy.config.models import Attention, DType


class CriticConfig(Section):
    """A value model for `loss.advantage = "gae"`: the body of a language model with one number in place of its head."""

    model: str | None = None
    """Hub id or folder whose body it starts from; the student's when not set. The new head starts at 0."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-5
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which its own learning rate rises."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    grad_clip: Annotated[float, Field(gt=0)] = 1.0
    value_clip: Annotated[float, Field(gt=0)] = 0.5
    """How far a value may move from the one before the step until its loss stops pulling."""
    only_steps: Annotated[int, Field(ge=0)] = 0
    """So many first steps train the critic alone; the student waits until its advantages mean something."""
    attention: Attention | None = None
    """`student.attention` when not set."""
    dtype: DType = "float32"
    gradient_checkpointing: bool = False
    process: bool = False
    """In a process of its own, which the run starts and watches; else in the trainer's, on the student's device. A pool
    (`cluster.roles.critic`) means a process too. The figures are the same, to the bit on a CPU."""
    device: Device | None = None
    """Of a process of its own: `auto` (a GPU of its own where there are several), `cpu`, `cuda` or `cuda:N` (that one, whoever else
    sits there). Not set: `cpu` where the student is, else `auto`."""


class ReferenceConfig(Section):
    """A frozen model the student is kept near (`loss.kl_coef`)."""

    model: str | None = None
    """Hub id or folder; the student as it starts when not set. It must share the student's tokens."""
    attention: Attention | None = None
    """`student.attention` when not set."""
    dtype: DType = "float32"
