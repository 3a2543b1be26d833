"""Compiles decoder layers one by one with torch.compile, for the student and for teachers.

Compiling one layer takes seconds where a whole model takes minutes, and all layers share the compiled code.
Besides its matrix products a layer mostly reads and writes memory (norms, rotary positions, gates, sums);
compiled, those become a few kernels, forward and backward. Results change in their last bits, as they do on
another device.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

BACKEND = "inductor"
"""torch's default compiler."""
_CACHE = "TORCHINDUCTOR_CACHE_DIR"


def compile_layers(body: Any) -> bool:
    """Compiles the layers of a transformers model without its head; False if `body` keeps them elsewhere.

    For any lengths (`dynamic=True`) from the first batch on. Otherwise torch would recompile in the middle of a run,
    for a short row, a new bound or a new way of packing, and stop compiling after a few times.
    """
    layers = getattr(body, "layers", None)
    if layers is None:
        return False
    _keep_compiled_code()
    for layer in layers:
        layer.compile(backend=BACKEND, dynamic=True)
    if (last := getattr(body, "norm", None)) is not None:
        last.compile(backend=BACKEND, dynamic=True)
    return True


def _keep_compiled_code() -> None:
    """Has torch keep compiled code in the user's cache folder, so that the next run of a model starts from it.

    torch finds it by the graph, its own version and the device. Its default is a folder in /tmp: lost with a
    container, and of a name that another user of the machine could take.
    """
    if _CACHE in os.environ:
        return
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = home / "understudy" / "compiled"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:  # a home folder that cannot be written: torch's default
        return
    os.environ[_CACHE] = str(folder)
