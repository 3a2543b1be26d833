"""Understudy: on-policy distillation of language models.

The two verbs of the system are *produce* (prompt → rollout → teacher scores → row) and *update*
(rows → loss → step → new weights). From Python, :func:`distill` and :func:`train` run them:

    run = understudy.distill(student="…", teacher="…", data="prompts.jsonl")

Importing this module imports no heavy dependency; torch is loaded when a run starts.
"""

from understudy import errors
from understudy.api import Run, distill, train

__all__ = ["Run", "__version__", "distill", "errors", "train"]
__version__ = "0.1.0"
