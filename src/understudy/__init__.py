"""Understudy: on-policy distillation of language models.

The two verbs of the system are *produce* (prompt → rollout → teacher scores → row) and *update*
(rows → loss → step → new weights). From Python, :func:`distill`, :func:`train` and :func:`resume` run them:

    run = understudy.distill(student="…", teacher="…", data="prompts.jsonl")

Importing this module imports nothing else; the rest is loaded by the first use of a name, torch when a run starts.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from understudy import errors
    from understudy.api import Evaluation, Run, SavedCheckpoint, Step, distill, resume, train

__all__ = [
    "Evaluation",
    "Run",
    "SavedCheckpoint",
    "Step",
    "__version__",
    "distill",
    "errors",
    "resume",
    "train",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("understudy.errors")
    if name in __all__:
        return getattr(importlib.import_module("understudy.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
