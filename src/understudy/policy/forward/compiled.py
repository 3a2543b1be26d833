"""Compiles decoder layers one by one with torch.compile.

Compiling one layer takes seconds where a whole model takes minutes, and all layers share the compiled code.
Besides its matrix products a layer mostly reads and writes memory (norms, rotary positions, gates, sums);
compiled, those become a few kernels, forward and backward. Results change in their last bits, as they do on
another device.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from understudy.errors import PolicyError
from understudy.policy.forward.head import body_of

BACKEND = "inductor"
"""torch's default compiler."""


def compile_layers(model: PreTrainedModel) -> None:
    """Compiles for any lengths (`dynamic=True`) from the first micro-batch on. Otherwise torch would
    recompile in the first step, and again in a later one whose last micro-batch is a short row, and the
    whole run would wait."""
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
