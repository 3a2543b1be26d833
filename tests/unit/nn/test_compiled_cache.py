"""Compiled code is cached in the user's cache folder, unless an environment variable names another one."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PROGRAM = """
import json, os, sys, torch, torch._dynamo, torch._inductor.config
from understudy.nn.compiled_layers import compile_layers

class Body(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4)])

for line in sys.stdin:
    if os.fork():
        assert os.wait()[1] == 0
        continue
    os.environ.clear()
    os.environ.update(json.loads(line))
    assert compile_layers(Body()) and not compile_layers(torch.nn.Linear(4, 4))
    from torch._inductor.runtime.cache_dir_utils import cache_dir
    print(cache_dir(), flush=True)
    os._exit(0)
"""
Folder = Callable[..., str]


@pytest.fixture(scope="module")
def folder() -> Iterator[Folder]:
    """Asks where a process with the given home and environment caches compiled code; forks of one process that has
    imported torch."""
    without = {
        key: value
        for key, value in os.environ.items()
        if key not in ("TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME")
    }
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], env=without, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def ask(home: Path, **environment: str) -> str:
        assert program.stdin is not None and program.stdout is not None
        print(json.dumps({**without, "HOME": str(home), **environment}), file=program.stdin, flush=True)
        answer = program.stdout.readline().strip()
        assert answer, "the program failed"
        return answer

    yield ask
    program.communicate()
    assert program.returncode == 0


def test_compiled_code_is_cached_in_the_users_cache_folder(folder: Folder, tmp_path: Path) -> None:
    assert folder(tmp_path) == str(tmp_path / ".cache" / "understudy" / "compiled")
    assert (tmp_path / ".cache" / "understudy" / "compiled").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("key", ["TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME"])
def test_environment_variables_choose_the_folder_of_compiled_code(
    folder: Folder, tmp_path: Path, key: str
) -> None:
    assert folder(tmp_path / "home", **{key: str(tmp_path / "own")}).startswith(str(tmp_path / "own"))


def test_torchs_default_folder_is_used_if_the_home_folder_cannot_be_written(
    folder: Folder, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    assert "understudy" not in folder(tmp_path / "file", TMPDIR=str(tmp_path))
