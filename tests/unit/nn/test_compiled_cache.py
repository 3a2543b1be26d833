"""Compiled code stays in the user's cache folder, unless the user or the machine says otherwise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, torch
from understudy.nn.compiled_layers import compile_layers

class Body(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4)])

assert compile_layers(Body()) and not compile_layers(torch.nn.Linear(4, 4))
from torch._inductor.runtime.cache_dir_utils import cache_dir
print(cache_dir())
"""


def folder(home: Path, **environment: str) -> str:
    without = {
        key: value
        for key, value in os.environ.items()
        if key not in ("TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME")
    }
    return subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**without, "HOME": str(home), **environment}, check=True,
        capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip


def test_it_is_where_caches_of_the_user_are(tmp_path: Path) -> None:
    assert folder(tmp_path) == str(tmp_path / ".cache" / "understudy" / "compiled")
    assert (tmp_path / ".cache" / "understudy" / "compiled").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("key", ["TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME"])
def test_the_user_may_say_where(tmp_path: Path, key: str) -> None:
    assert folder(tmp_path / "home", **{key: str(tmp_path / "own")}).startswith(str(tmp_path / "own"))


def test_a_home_that_cannot_be_written_is_torch_s_affair(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "understudy" not in folder(tmp_path / "file", TMPDIR=str(tmp_path))
