"""The reference pages: generated ones are up to date; the page of metrics names every metric and no other."""

import ast
import json
import re
import runpy
from functools import cache
from pathlib import Path

import pytest
from sources import nodes

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "understudy"
GENERATED = runpy.run_path(str(ROOT / "docs" / "reference" / "generate.py"))["PAGES"]
METRICS = (ROOT / "docs" / "reference" / "metrics.md").read_text()
ROOTS = r"actor|async|critic|perf|response_length|rollout|rollout_corr|rows|teacher|time|training|val"
NO_METRICS = {"rows/s", "val/teacher_accuracy"}
"""Strings that look like metrics: a unit, and the beginning of a name."""
PLACE = r"[^/`]+"
"""Stands for a name that is only known in a run."""


@pytest.mark.parametrize("path", GENERATED, ids=lambda path: path.name)
def test_a_generated_page_is_current(path: Path) -> None:
    assert path.read_text() == GENERATED[path](), "run: python docs/reference/generate.py"


def described() -> set[str]:
    """Names of the page; words in capitals are placeholders."""
    names = re.findall(rf"`((?:{ROOTS})/[^`\s]+)`", METRICS)
    return {*names, *(f"{name}_{end}" for name in names for end in ("min", "max"))}


@cache
def patterns() -> re.Pattern[str]:
    parts = [re.sub(r"\\?[A-Z]{2,}|(?<=@)K", PLACE, re.escape(name)) for name in described()]
    return re.compile("|".join(parts))


@cache
def written() -> dict[str, str]:
    """Whole metric names among the source's string literals → their file."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        for node in nodes(path):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and re.fullmatch(rf"(?:{ROOTS})(?:/[\w@]+)*/\w*[a-z0-9]", text):
                found[text] = str(path.relative_to(SOURCE))
    return {name: path for name, path in found.items() if name not in NO_METRICS}


def test_every_metric_of_the_source_is_described() -> None:
    assert len(written()) > 80
    assert {name: path for name, path in written().items() if not patterns().fullmatch(name)} == {}


def test_every_metric_of_the_recorded_run_is_described() -> None:
    lines = (SOURCE / "viewer" / "demo" / "metrics.jsonl").read_text().splitlines()
    names = {name for line in lines for name in json.loads(line)} - {"step"}
    assert {name for name in names if not patterns().fullmatch(name)} == set()


def test_every_described_metric_exists_in_the_source() -> None:
    words = {word for path in SOURCE.rglob("*.py") for word in re.findall(r"\w+", path.read_text())}
    names = {name for name in described() if not name.endswith(("_min", "_max"))}
    plain = {name for name in names if not re.search(r"[A-Z]", name)}
    composed = {"val/failed", "time/rollout/slowest/key"}  # from a name and a prefix
    assert plain - written().keys() - composed == set()
    assert {
        name for name in names - plain if (end := name.rpartition("/")[2]).islower() and end not in words
    } == set()


def test_the_pattern_of_described_metrics_does_not_match_other_names() -> None:
    for name in ("actor/grad_norms", "perf/gpu", "teacher/add", "val/best@3"):
        assert not patterns().fullmatch(name)
