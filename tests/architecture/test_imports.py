"""Who may import whom (the plan is in docs/architecture.md), read from the source itself."""

import ast
import subprocess
import sys
from collections import Counter
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "understudy"
LAYERS = (
    {"errors"},
    {"nn", "types", "assets"},
    {"config", "observability", "serving"},
    {"cluster", "dataplane", "losses", "teacher", "weights"},
    {"engines", "policy"},
    {"rollout"},
    {"planning"},
    {"trainers"},
    {"assembly"},
    {"run"},
    {"api"},
    {"cli"},
)
"""Each room imports from lower layers alone; rooms of one layer do not know each other."""
STRANGERS = {
    "cluster": {"types", "serving"},
    "losses": {"config", "observability", "serving", "nn"},
    "serving": {"types", "nn"},
    "config": {"types", "nn"},
    "policy": {"teacher", "dataplane", "losses", "cluster", "config"},
    "engines": {"teacher", "dataplane", "losses", "cluster", "config"},
    "rollout": {"teacher", "dataplane", "losses", "policy", "weights", "cluster", "config"},
}
"""Lower rooms that a room does without all the same: it is handed what it needs."""
ONLY_IN_ADAPTERS = {"ray": "cluster/ray", "transfer_queue": "dataplane/transfer_queue/"}
NEVER = {"vllm", "sglang"}
ENGINES_SEEN_BY_ROLLOUT = {
    "understudy.engines.base",
    "understudy.engines.remote_tokens",
    "understudy.engines.servers.worker_client",
}
"""The protocol, and the client by which workers bring tokens to engines; never an engine."""
MOST_FILES = 16
WHOLE_RECIPE = ("planning", "trainers", "assembly", "run", "cli", "config", "api")


def allowed(own: str) -> set[str]:
    lower: set[str] = set()
    for layer in LAYERS:
        if own in layer:
            return lower - STRANGERS.get(own, set())
        lower |= layer
    raise AssertionError(f"{own} is in no layer")


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
        assert parts[1] in allowed(own), f"{own} may not import {parts[1]} ({path.name}: {name})"
        if own == "rollout" and parts[1] == "engines" and len(parts) > 2:
            assert any(name == seen or name.startswith(f"{seen}.") for seen in ENGINES_SEEN_BY_ROLLOUT), (
                f"{path.name}: rollout sees the engine protocol, never a concrete engine"
            )


def test_no_folder_is_too_full() -> None:
    folders = Counter(path.parent for path in FILES if path.name != "__init__.py")
    assert not {str(folder): files for folder, files in folders.items() if files > MOST_FILES}


def test_no_modules_import_each_other() -> None:
    """No circle of imports, those for types and inside functions counted."""
    modules = {module(path): path for path in FILES}
    wanted = {
        name: {other for other in imports(path) & modules.keys() if other != name}
        for name, path in modules.items()
    }
    try:
        tuple(TopologicalSorter(wanted).static_order())
    except CycleError as circle:
        pytest.fail(" -> ".join(circle.args[1]))


def module(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_outside_systems_stay_in_their_adapters(path: Path) -> None:
    tops = {name.split(".")[0] for name in imports(path)}
    assert not tops & NEVER, "vLLM and SGLang run as processes of their own and are never imported"
    for system, home in ONLY_IN_ADAPTERS.items():
        if system in tops:
            assert str(path.relative_to(PACKAGE)).startswith(home), f"{system} belongs in {home}"


def test_only_build_and_cli_see_the_whole_recipe() -> None:
    for path in FILES:
        if room(path) not in WHOLE_RECIPE:
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
