"""Finds installed dependencies that are older than the package's metadata asks for.

pip keeps the bounds when it installs Understudy. A later install of another package can break them.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Container

FRAMEWORKS = ("torch", "transformers")
_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)[^;]*>=(?P<bound>\d+(\.\d+)*)[^;]*$")
"""A requirement with a lower bound. One with a marker, as those of extras, does not match."""


def too_old(names: Container[str] | None = None) -> list[str]:
    """One line for each installed dependency below its lower bound. Looks only at `names` if they are given.

    A release above an upper bound is no problem here: those bounds guide pip, and newer releases mostly work.
    """
    try:
        requirements = importlib.metadata.requires("understudy") or []
    except importlib.metadata.PackageNotFoundError:  # a source tree on the path, never installed
        return []
    found = []
    for requirement in requirements:
        match = _REQUIREMENT.match(requirement)
        if match is None or (names is not None and match["name"] not in names):
            continue
        try:
            version = importlib.metadata.version(match["name"])
        except importlib.metadata.PackageNotFoundError:
            continue  # `check` and `plan` need no torch
        if _release(version) < _release(match["bound"]):
            found.append(
                f"{match['name']} {version} is installed, and Understudy needs {match['bound']} or newer: "
                f'pip install "{requirement}"'
            )
    return found


def _release(version: str) -> tuple[int, ...]:
    """Its numbers: those of 2.6.0a0+git are 2, 6 and 0, and such a build counts as 2.6."""
    return tuple(int(number) for number in re.findall(r"\d+", version.split("+")[0])[:3])
