"""Every dependency is imported by the package, and every import from outside is declared."""

import ast
import re
import sys
import tomllib
from functools import cache
from pathlib import Path

from sources import nodes

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULES = {"pyyaml": "yaml", "transferqueue": "transfer_queue"}
"""Distributions whose module has another name → that name."""
BUNDLED = {
    "pydantic_core": "pydantic",
    "tensordict": "transferqueue",
    "triton": "torch",
}
"""Modules that come with a dependency and follow its version → that dependency."""
OWN = {"understudy", "understudy_copy_plan"}


def module_of(requirement: str) -> str:
    name = re.split(r"[^\w-]", requirement.lower())[0].replace("-", "_")
    return MODULES.get(name, name)


@cache
def imported() -> dict[str, str]:
    """Third-party modules, each with a file that imports it."""
    found = {}
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in nodes(path):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            for name in names:
                found.setdefault(name.partition(".")[0], str(path.relative_to(ROOT)))
    return {
        name: path for name, path in found.items() if name not in sys.stdlib_module_names and name not in OWN
    }


def test_every_dependency_is_imported() -> None:
    declared = {module_of(one) for one in PROJECT["dependencies"]}
    assert declared and declared - imported().keys() == set()


def test_every_import_is_declared() -> None:
    extras = [one for group in PROJECT["optional-dependencies"].values() for one in group]
    declared = {module_of(one) for one in [*PROJECT["dependencies"], *extras]}
    missing = {name: path for name, path in imported().items() if name not in declared}
    assert {
        name: path for name, path in missing.items() if BUNDLED.get(name) not in declared | {"transferqueue"}
    } == {}
