"""`[critic]` and `[reference]`: further models that a policy gradient may use."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from understudy.config.base import Section
from understudy.config.devices import Device
from understudy.config.models import Attention, DType, Model


class CriticConfig(Section):
    """`[critic]`: a value model for `loss.advantage = "gae"`: the body of a language model with a scalar head."""

    model: Model | None = None
    """Hub id or folder of the model whose body the critic starts from; by default the student's. The new head
    starts at 0."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-5
    """The critic's peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or falling towards 0 at the end of the run."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the critic's learning rate rises from 0."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's weight decay of the critic."""
    grad_clip: Annotated[float, Field(gt=0)] = 1.0
    """Largest norm of the critic's gradient; a larger one is scaled down to it."""
    value_clip: Annotated[float, Field(gt=0)] = 0.5
    """How far a value may move from its value before the step; beyond this its loss has no gradient."""
    only_steps: Annotated[int, Field(ge=0)] = 0
    """Number of first steps that train only the critic, so that advantages are meaningful when the student
    starts."""
    attention: Attention | None = None
    """Attention implementation; by default `student.attention`."""
    dtype: DType = "float32"
    """Dtype of the weights in forward and backward; master weights stay float32."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them."""
    process: bool = False
    """Run the critic in its own process, which the run starts and watches; otherwise it runs in the trainer's
    process, on the student's device. A pool (`cluster.roles.critic`) implies its own process. The results are
    the same, on a CPU to the bit."""
    device: Device | None = None
    """Device of its own process: `auto` (its own GPU if there are several), `cpu`, `cuda` or `cuda:N` (that GPU,
    even if other processes use it). By default `cpu` if the student is on a CPU, else `auto`."""


class ReferenceConfig(Section):
    """`[reference]`: a frozen model near which the student is kept (`loss.kl_coef`)."""

    model: Model | None = None
    """Hub id or folder; by default the student as it was at the start. It must have the student's tokens."""
    attention: Attention | None = None
    """Attention implementation; by default `student.attention`."""
    dtype: DType = "float32"
    """Dtype of the reference's weights."""
