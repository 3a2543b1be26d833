"""Recipes parse; the README, docs, CI and workflows refer to things that exist."""

import re
import runpy
import tomllib
from pathlib import Path

import pytest

from understudy.cli.main import _COMMANDS
from understudy.config import load_recipe

ROOT = Path(__file__).parents[2]
RECIPES = sorted([*ROOT.glob("recipes/**/*.toml"), *ROOT.glob("src/understudy/assets/**/*.toml")])


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_shipped_recipe_parses(path: Path) -> None:
    assert load_recipe(path).student.model


def test_at_least_one_shipped_recipe_is_found() -> None:
    assert RECIPES


def test_make_targets_and_commands_of_the_readme_exist() -> None:
    readme = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for target in re.findall(r"^make ([\w-]+)", readme, re.MULTILINE):
        assert target in targets
    for command in re.findall(r"\bunderstudy ([a-z][\w-]*)\b(?= [A-Za-z.\"/-]|$|`)", readme):
        if f"`understudy {command}" in readme or f"\nunderstudy {command}" in readme:
            assert command in _COMMANDS
    assert "make quickstart" in readme and "make test" in readme


def test_ci_runs_the_readme_test_command() -> None:
    assert re.search(r"^make test$", (ROOT / ".ci/run").read_text(), re.MULTILINE)


def test_local_links_in_the_docs_lead_to_existing_files() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")]:
        for link in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            if not link.startswith(("http://", "https://")):
                assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_the_speed_page_is_up_to_date_with_the_result_files() -> None:
    module = runpy.run_path(str(ROOT / "docs" / "reference" / "speed_page.py"))
    assert module["PAGE"].read_text() == module["page"](), "run docs/reference/speed_page.py"


def test_every_page_except_decision_records_is_in_the_site_s_navigation() -> None:
    """Decision records are read in the repository only."""
    nav = (ROOT / "zensical.toml").read_text()
    placed = re.findall(r'"([\w/-]+\.md)"', nav)
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in ROOT.glob("docs/**/*.md")}
    assert sorted(placed) == sorted(page for page in pages if not page.startswith("decisions/"))


def test_the_citation_has_the_version_of_the_package() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"version: {version}\n" in (ROOT / "CITATION.cff").read_text()


def test_workflows_call_make_targets_that_exist() -> None:
    targets = set(re.findall(r"^([\w.-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = "\n".join(path.read_text() for path in ROOT.glob(".github/workflows/*.yml"))
    called = re.findall(r"run: make ([\w-]+)", text)
    assert {"docs", "test"} <= set(called) <= targets and (ROOT / ".ci" / "run").is_file()
