"""`[critic]` and `[reference]`: two further models that a policy gradient may use."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from understudy.config.base import Section
from understudy.config.devices import Device
from understudy.config.models import Attention, DType, Model


class CriticConfig(Section):
    """`[critic]`: a value model for `loss.advantage = "gae"`: the body of a language model with a scalar head."""

    model: Model | None = None
    """Hub id or folder whose body it starts from; the student's when not set. The new head starts at 0."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-5
    """The critic's peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls towards the end of the run, after the warm-up."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Warm-up steps of its own learning rate."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's weight decay of the critic."""
    grad_clip: Annotated[float, Field(gt=0)] = 1.0
    """Largest norm of the critic's gradient; a larger one is scaled down to it."""
    value_clip: Annotated[float, Field(gt=0)] = 0.5
    """How far a value may move from the one before the step until its loss has no more gradient."""
    only_steps: Annotated[int, Field(ge=0)] = 0
    """The first steps that train the critic alone; the student starts after them, when advantages mean
    something."""
    attention: Attention | None = None
    """`student.attention` when not set."""
    dtype: DType = "float32"
    """Dtype of the weights in forward and backward; masters stay float32."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them."""
    process: bool = False
    """Run it in a process of its own, which the run starts and watches; else in the trainer's, on the
    student's device. A pool (`cluster.roles.critic`) means a process too. The results are the same, to the
    bit on a CPU."""
    device: Device | None = None
    """Device of its own process: `auto` (a GPU of its own if there are several), `cpu`, `cuda` or `cuda:N`
    (that GPU, even if other processes use it). Not set: `cpu` if the student is on a CPU, else `auto`."""


class ReferenceConfig(Section):
    """`[reference]`: a frozen model the student is kept near (`loss.kl_coef`)."""

    model: Model | None = None
    """Hub id or folder; the student as it starts when not set. It must share the student's tokens."""
    attention: Attention | None = None
    """`student.attention` when not set."""
    dtype: DType = "float32"
    """Dtype of the reference's weights."""
