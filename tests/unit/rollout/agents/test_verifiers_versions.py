"""Releases of `verifiers` without environments are refused."""

import sys
from pathlib import Path

import pytest

from understudy.errors import ConfigError
from understudy.rollout.agents.verifiers_env import load_environment


def test_a_verifiers_release_without_environments_is_refused_with_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "verifiers" / "v1").mkdir(parents=True)
    (tmp_path / "verifiers" / "__init__.py").touch()
    (tmp_path / "verifiers-0.4.0.dist-info").mkdir()
    (tmp_path / "verifiers-0.4.0.dist-info" / "METADATA").write_text("Name: verifiers\nVersion: 0.4.0\n")
    for name in [name for name in sys.modules if name.partition(".")[0] == "verifiers"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"verifiers 0\.4\.0 has tasksets .* expected 0\.1\.14 to 0\.3"):
        load_environment("my-environment")
    for name in [name for name in sys.modules if name.partition(".")[0] == "verifiers"]:
        del sys.modules[name]
