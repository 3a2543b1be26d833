"""Who may import whom (the plan is in docs/architecture.md), read from the source itself."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "understudy"
BASE = {"types", "errors", "observability"}
LOW = BASE | {"config", "serving"}
ALLOWED = {
    "errors": set(),
    "types": {"errors"},
    "config": {"errors"},
    "serving": {"errors"},
    "observability": {"errors", "types"},
    "cluster": {"config", "observability", "errors"},
    "engines": LOW,
    "losses": LOW,
    "policy": LOW | {"engines"},
    "weights": LOW | {"engines"},
    "teacher": LOW | {"engines"},
    "rollout": LOW | {"engines"},
    "dataplane": LOW | {"engines"},
    "assets": set(),
    "api": {"config", "errors", "observability", "trainers"},
}
ALLOWED["trainers"] = set(ALLOWED) | {"api"}
ALLOWED["cli"] = set(ALLOWED) | {"trainers"}
ONLY_IN_ADAPTERS = {"ray": "cluster/ray", "transfer_queue": "dataplane/transfer_queue"}
NEVER = {"vllm", "sglang"}
CONCRETE_ENGINES = {
    "understudy.engines.local.engine",
    "understudy.engines.servers.vllm",
    "understudy.engines.openai",
    "understudy.engines.sglang",
}


@cache
def imports(path: Path) -> frozenset[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative imports hide where a name comes from"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return frozenset(found)


def room(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_rooms_import_only_downwards(path: Path) -> None:
    own = room(path)
    for name in imports(path):
        parts = name.split(".")
        if parts[0] != "understudy" or len(parts) < 2 or parts[1] in (own, "__version__"):
            continue
        assert parts[1] in ALLOWED[own], f"{own} may not import {parts[1]} ({path.name}: {name})"
    if own in ("rollout", "teacher"):
        assert not imports(path) & CONCRETE_ENGINES, (
            f"{path.name}: {own} sees the engine protocol, never a concrete engine"
        )


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_outside_systems_stay_in_their_adapters(path: Path) -> None:
    tops = {name.split(".")[0] for name in imports(path)}
    assert not tops & NEVER, "vLLM and SGLang run as processes of their own and are never imported"
    for system, home in ONLY_IN_ADAPTERS.items():
        if system in tops:
            assert str(path.relative_to(PACKAGE)).startswith(home), f"{system} belongs in {home}"


def test_only_build_and_cli_see_the_whole_recipe() -> None:
    for path in FILES:
        if room(path) not in ("trainers", "cli", "config", "api"):
            assert "understudy.config.recipe" not in imports(
                path
            ) and "understudy.config.Recipe" not in imports(path), path


def test_no_room_called_utils() -> None:
    assert not [
        path for path in PACKAGE.rglob("*") if path.stem in ("utils", "util", "helpers", "misc", "common")
    ]


@pytest.mark.parametrize(
    "module",
    [
        "understudy",
        "understudy.config",
        "understudy.cli.main",
        "understudy.losses.describe",
        "understudy.planning.preflight",
    ],
)
def test_light_modules_do_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_nothing_unpickles_or_evaluates() -> None:
    """Safetensors, JSON, TOML and our own frames; nothing from outside is executed, save by the jail, which is the
    isolated child process that model-written code is for."""
    for path in FILES:
        if path.relative_to(PACKAGE).as_posix() == "rollout/tools/jail.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in (
                    "eval",
                    "exec",
                    "torch.load",
                    "pickle.load",
                    "pickle.loads",
                    "marshal.loads",
                ), f"{path}: {called}"
                for keyword in node.keywords:
                    if keyword.arg == "trust_remote_code":
                        assert not (
                            isinstance(keyword.value, ast.Constant) and keyword.value.value is True
                        ), path
