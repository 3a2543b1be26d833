"""Who may import whom (the plan is in docs/architecture.md), read from the source itself."""

import ast
import subprocess
import sys
from collections import Counter
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from sources import nodes

PACKAGE = Path(__file__).parents[2] / "src" / "understudy"
LAYERS = (
    {"errors"},
    {"media"},
    {"nn", "types", "assets"},
    {"config", "observability", "serving"},
    {"weights"},
    {"cluster", "dataplane", "losses", "porting", "teacher"},
    {"engines", "policy", "viewer"},
    {"rollout"},
    {"planning"},
    {"trainers"},
    {"assembly"},
    {"run"},
    {"api"},
    {"cli"},
    {"__main__"},
)
"""Each room imports from lower layers alone; rooms of one layer do not know each other."""
STRANGERS = {
    "cluster": {"types", "serving"},
    "porting": {"types", "nn", "assets", "observability", "serving"},
    "losses": {"config", "observability", "serving", "nn"},
    "serving": {"types", "nn"},
    "config": {"types", "nn"},
    "policy": {"teacher", "dataplane", "losses", "cluster", "config"},
    "engines": {"teacher", "dataplane", "losses", "cluster", "config"},
    "viewer": {"teacher", "losses", "cluster", "weights", "config", "serving", "types", "nn", "assets"},
    "rollout": {"viewer", "teacher", "dataplane", "losses", "policy", "weights", "cluster", "config"},
}
"""Lower rooms that a room does without all the same: it is handed what it needs."""
ONLY_IN_ADAPTERS = {"ray": "cluster/ray", "transfer_queue": "dataplane/transfer_queue/"}
NEVER = {"vllm", "sglang"}
ENGINES_SEEN_BY_ROLLOUT = {"understudy.engines.base"}
"""The protocol, never an engine."""
MOST_FILES = 16
MOST_FIELDS = 12
WHOLE_RECIPE = {
    "api.py",  # the caller's own `Recipe`
    "assembly/build.py",  # starts the parts
    "cli/reading.py",  # reads and checks one
    "run/changed_recipe.py",  # compares two
    "run/launch.py",  # writes it into the run directory
}
"""Files outside `config` and `planning` that take a whole recipe. All others take a section of it, or a record
of `planning.resolved`."""
READ_A_RECIPE = {
    "api.py",
    "assembly/this_machine.py",
    "run/changed_recipe.py",
    "run/evaluate_model.py",
    "run/export.py",
}
"""Files that parse one and pass sections of it on, besides `cli/reading.py`."""
WHOLE_RESOLVED = {"assembly/build.py", "assembly/this_machine.py", "run/replay.py"}
"""Files that take every record at once: they start the parts of a run or of a replay."""


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
    for node in nodes(path):
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


ROOT = Path(__file__).parents[2]
SCRIPTS = [
    path for top in ("benchmarks", "recipes", "examples") for path in sorted((ROOT / top).rglob("*.py"))
]


def test_no_folder_is_too_full() -> None:
    tests = (ROOT / "tests").rglob("*.py")
    folders = Counter(path.parent for path in [*FILES, *SCRIPTS, *tests] if path.name != "__init__.py")
    assert not {str(folder): files for folder, files in folders.items() if files > MOST_FILES}


def test_no_two_test_modules_have_one_name() -> None:
    """pytest imports them by their names alone, and refuses the second of two."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("*.py"))
    assert not {name for name, files in names.items() if files > 1} - {"__init__.py", "conftest.py"}


def test_scripts_import_names_that_exist() -> None:
    """Types of recipes and examples are not checked and some need a GPU, so that a renamed class would go unnoticed."""
    modules = {module(path): path for path in [*FILES, PACKAGE / "__init__.py"]}
    missing = []
    for script in SCRIPTS:
        for node in nodes(script):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("understudy."):
                continue
            source = modules.get(node.module or "")
            defined = bound_names(source) if source is not None else set()
            missing += [
                f"{script.relative_to(ROOT)}: {node.module}.{alias.name}"
                for alias in node.names
                if alias.name not in defined and f"{node.module}.{alias.name}" not in modules
            ]
    assert not missing


def bound_names(path: Path) -> set[str]:
    """Names that a module binds at its top level."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        for part in ast.walk(node):
            if isinstance(part, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(part.name)
            elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                found.add(part.id)
            elif isinstance(part, ast.Import | ast.ImportFrom):
                found |= {alias.asname or alias.name for alias in part.names}
    return found


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


def test_few_files_take_a_whole_recipe() -> None:
    """By importing the class, if only for an annotation, or by reading one."""

    def takers(*names: str) -> set[str]:
        modules = ("config", "config.recipe", "planning.resolved")
        wanted = {f"understudy.{module}.{name}" for module in modules for name in names}
        outside = [path for path in FILES if room(path) not in ("config", "planning")]
        return {path.relative_to(PACKAGE).as_posix() for path in outside if imports(path) & wanted}

    assert takers("Recipe") == WHOLE_RECIPE
    assert takers("parse_recipe", "load_recipe") == READ_A_RECIPE
    assert takers("Resolved") == WHOLE_RESOLVED


def test_the_parts_of_a_run_are_small_records_without_the_recipe() -> None:
    """Of `trainers/system.py`. A function takes the record it needs, and asks its `settings`."""
    tree = ast.parse((PACKAGE / "trainers" / "system.py").read_text())
    records = {
        node.name: [field.target.id for field in node.body if isinstance(field, ast.AnnAssign)]  # type: ignore[union-attr]
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }
    assert {"System", "Producer", "Learner", "RunState"} <= records.keys()
    assert not {name: fields for name, fields in records.items() if len(fields) > MOST_FIELDS}
    assert not [name for name, fields in records.items() if "recipe" in fields]


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
        "understudy.porting.trl",
        "understudy.porting.verl",
        "understudy.planning.resolved",
        "understudy.planning.this_machine",
        "understudy.viewer.serve",
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
        for node in nodes(path):
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


def test_a_class_name_means_one_thing() -> None:
    """No two modules have public classes of the same name."""
    places: dict[str, list[str]] = {}
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
