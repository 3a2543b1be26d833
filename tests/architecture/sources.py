"""The syntax trees of the project's files, parsed once for the tests of a module."""

import ast
from functools import cache
from pathlib import Path


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Every node of a file's syntax tree, in the order of `ast.walk`."""
    return list(ast.walk(ast.parse(path.read_text())))
