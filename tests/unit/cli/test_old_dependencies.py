"""A dependency below its lower bound is named with the command that replaces it."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from understudy.cluster.installed import too_old


def install(folder: Path, name: str, version: str) -> None:
    """What an installer writes about a package; found before the real one if `folder` is first on the path."""
    metadata = folder / f"{name}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "understudy", *words],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "200"},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


def test_check_names_every_old_framework_and_what_to_install(tmp_path: Path) -> None:
    install(tmp_path, "torch", "2.5.1+cu124")
    install(tmp_path, "transformers", "4.57.6")
    table = {"student.model": "lost", "teachers.one.model": "lost", "data.train": "rows.jsonl"}
    (tmp_path / "recipe.toml").write_text(
        "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
    )
    done = command(tmp_path, "check", "recipe.toml")
    assert done.returncode == 2
    torch, transformers = done.stderr.splitlines()[:2]
    needs = r"is installed, and Understudy needs [\d.]+ or newer: pip install"
    assert re.fullmatch(rf'error: torch 2\.5\.1\+cu124 {needs} "torch\S+"', torch)
    assert re.fullmatch(rf'error: transformers 4\.57\.6 {needs} "transformers\S+"', transformers)


@pytest.mark.parametrize("words", [["doctor"], ["serve-teacher", "."]])
def test_an_import_that_fails_is_explained_by_the_old_version(tmp_path: Path, words: list[str]) -> None:
    install(tmp_path, "torch", "2.5.1")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "torch.py").write_text("from math import FSDPModule\n")
    done = command(tmp_path, *words)
    assert done.returncode == 2
    first, second = done.stderr.splitlines()[:2]
    assert first.startswith("error: torch 2.5.1 is installed, and Understudy needs ")
    assert second.startswith("error: unexpected ImportError: cannot import name 'FSDPModule'")


@pytest.mark.parametrize(
    ("version", "old"), [("0.19.0", True), ("0.20.0", False), ("0.20.0a0+git1", False), ("1.0", False)]
)
def test_pre_releases_count_as_their_release(
    version: str, old: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "msgspec", version)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(
        importlib.metadata, "requires", lambda _: ["msgspec>=0.20", 'peft>=99; extra == "lora"']
    )
    line = f'msgspec {version} is installed, and Understudy needs 0.20 or newer: pip install "msgspec>=0.20"'
    assert too_old() == ([line] if old else [])
