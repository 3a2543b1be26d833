"""Decides whether a CPU run trains in lanes: several micro-batches in parallel, each on one thread.

The operations of a small student end before a second thread has woken up. If another process, such as a
teacher, uses a core, the threads of an operation wait for each other. So a small student trains several
micro-batches in parallel ("lanes"), and all other operations of the trainer's process use one thread. The
decision depends only on the recipe and the student's folder, so a resume on another machine repeats it to the
bit.
"""

from __future__ import annotations

from pathlib import Path

from understudy.config import CriticConfig, StudentConfig
from understudy.planning.models.folder import ModelFolder

SMALL = 1 << 22
"""The most parameters of a student that trains in lanes. Every lane holds its own gradient, and the products
of larger students are large enough for several threads."""
KNOWN = {"llama", "qwen2", "qwen3"}
"""Model types whose layers keep no state between calls, so that threads may share them."""
STEADY = {"default", "linear", "llama3", "yarn"}
"""Rotary kinds that keep no state between calls."""


def lanes_of(
    student: StudentConfig, critic: CriticConfig | None, ranks: int, threads: int | None, *, on_cpu: bool
) -> int:
    """How many micro-batches train in parallel. 1: an operation uses all threads."""
    other_critic = critic is not None and critic.model is not None
    if threads is None or threads == 1 or ranks > 1 or student.compile or other_critic:
        return 1
    return threads if on_cpu and _is_small(Path(student.model)) else 1


def has_biases(folder: Path) -> bool:
    """Whether a model of a `KNOWN` type has biases: Qwen2 always does, the other types if their config says
    so."""
    config = ModelFolder(folder).config
    configured = any(config.get(name) for name in ("attention_bias", "mlp_bias"))
    return configured or config.get("model_type") == "qwen2"


def _is_small(folder: Path) -> bool:
    if not (folder / "config.json").is_file():
        return False
    model = ModelFolder(folder)
    rotary = model.config.get("rope_parameters") or model.config.get("rope_scaling") or {}
    return (
        model.config.get("model_type") in KNOWN
        and str(rotary.get("rope_type", "default")) in STEADY
        and 0 < model.parameters <= SMALL
    )
