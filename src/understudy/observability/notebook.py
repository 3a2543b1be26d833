"""Shows something in a notebook cell that is replaced in place. Needs nothing but the notebook's own IPython."""

from __future__ import annotations

import importlib
import io
import sys
from typing import Any

from rich.console import Console, RenderableType

_WIDTH = 100
_PAGE = '<pre style="white-space:pre;overflow-x:auto;line-height:normal">{code}</pre>'


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook, which has imported IPython before."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class NotebookCell:
    """One output of the current cell. Used on the cell's thread, or on one that has a copy of its context."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, content: RenderableType) -> None:
        """Replaces what was shown before."""
        bundle = _bundle(content)
        if self._handle is not None:
            self._handle.update(bundle, raw=True)
        elif bundle["text/plain"].strip():
            display = importlib.import_module("IPython.display").display
            self._handle = display(bundle, raw=True, display_id=True)


def _bundle(content: RenderableType) -> dict[str, str]:
    """The content as HTML, and as text for programs that show no HTML."""
    console = Console(record=True, file=io.StringIO(), width=_WIDTH, force_jupyter=False)
    console.print(content)
    text = console.export_text(clear=False)
    return {"text/html": console.export_html(inline_styles=True, code_format=_PAGE), "text/plain": text}
