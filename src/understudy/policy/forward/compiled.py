"""Decoder layers compiled one by one: seconds instead of minutes at the start, and one compiled layer serves them all.

Most of what a layer does besides its products is reading and writing memory (norms, rotary positions, gates, sums); compiled,
those become a few kernels, forward and backward. Numbers change in their last bits, as they do on another device.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from understudy.errors import PolicyError
from understudy.policy.forward.head import body_of

BACKEND = "inductor"
"""torch's own compiler."""


def compile_layers(model: PreTrainedModel) -> None:
    """For any lengths, from the first micro-batch on: left to find out what varies, torch would compile a second time in the first
    step, and once more in some later one whose last micro-batch is a short row, while everybody waits."""
    body = body_of(model)
    layers = getattr(body, "layers", None)
    if layers is None:
        raise PolicyError(
            f"{type(model).__name__} keeps its layers where compiling them is not supported; set student.compile = false"
        )
    for layer in layers:
        layer.compile(backend=BACKEND, dynamic=True)
    if (last := getattr(body, "norm", None)) is not None:
        last.compile(backend=BACKEND, dynamic=True)
