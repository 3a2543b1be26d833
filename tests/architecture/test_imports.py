"""Which folder may import which (docs/architecture.md), and other rules of the source that its syntax trees show."""

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
"""Each folder imports from lower layers only; folders of one layer do not import each other."""
FORBIDDEN_LOWER = {
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
"""Lower folders that a folder must not import all the same: it gets what it needs as arguments."""
ONLY_IN_ADAPTERS = {"ray": "cluster/ray", "transfer_queue": "dataplane/transfer_queue/"}
NEVER = {"vllm", "sglang"}
ENGINES_SEEN_BY_ROLLOUT = {"understudy.engines.base"}
"""Only the protocol, never an engine."""
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
            return lower - FORBIDDEN_LOWER.get(own, set())
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


def folder_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_folders_import_only_from_lower_layers(path: Path) -> None:
    own = folder_of(path)
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


def test_no_folder_has_more_than_16_files() -> None:
    tests = (ROOT / "tests").rglob("*.py")
    folders = Counter(path.parent for path in [*FILES, *SCRIPTS, *tests] if path.name != "__init__.py")
    assert not {str(folder): files for folder, files in folders.items() if files > MOST_FILES}


def test_names_of_test_modules_are_unique() -> None:
    """pytest imports test modules by their file names and refuses a second one of the same name."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("*.py"))
    assert not {name for name, files in names.items() if files > 1} - {"__init__.py", "conftest.py"}


def test_scripts_import_names_that_exist() -> None:
    """mypy does not check recipes and examples, and some need a GPU, so a renamed class would not be noticed."""
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


def test_imports_have_no_cycles() -> None:
    """Imports for types and inside functions count too."""
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
def test_ray_and_transfer_queue_are_imported_only_by_their_adapters_and_vllm_never(path: Path) -> None:
    tops = {name.split(".")[0] for name in imports(path)}
    assert not tops & NEVER, "vLLM and SGLang run as processes of their own and are never imported"
    for system, home in ONLY_IN_ADAPTERS.items():
        if system in tops:
            assert str(path.relative_to(PACKAGE)).startswith(home), f"{system} belongs in {home}"


def test_only_the_listed_files_take_a_whole_recipe() -> None:
    """A file takes one if it imports the class, even for an annotation, or reads a recipe."""

    def takers(*names: str) -> set[str]:
        modules = ("config", "config.recipe", "planning.resolved")
        wanted = {f"understudy.{module}.{name}" for module in modules for name in names}
        outside = [path for path in FILES if folder_of(path) not in ("config", "planning")]
        return {path.relative_to(PACKAGE).as_posix() for path in outside if imports(path) & wanted}

    assert takers("Recipe") == WHOLE_RECIPE
    assert takers("parse_recipe", "load_recipe") == READ_A_RECIPE
    assert takers("Resolved") == WHOLE_RESOLVED


def test_the_parts_of_a_run_are_small_records_without_the_recipe() -> None:
    """The records of `trainers/system.py`. A function takes the record that it needs and reads its `settings`."""
    tree = ast.parse((PACKAGE / "trainers" / "system.py").read_text())
    records = {
        node.name: [field.target.id for field in node.body if isinstance(field, ast.AnnAssign)]  # type: ignore[union-attr]
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }
    assert {"System", "Producer", "Learner", "RunState"} <= records.keys()
    assert not {name: fields for name, fields in records.items() if len(fields) > MOST_FIELDS}
    assert not [name for name, fields in records.items() if "recipe" in fields]


def test_no_file_or_folder_is_called_utils_helpers_misc_or_common() -> None:
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


def test_no_code_unpickles_evaluates_or_trusts_remote_code() -> None:
    """Data is read as safetensors, JSON, TOML and our own frames. Only the jail executes code: it is the isolated child
    process for code that a model wrote."""
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


def test_names_of_public_classes_are_unique() -> None:
    """A name means one class in the whole package."""
    places: dict[str, list[str]] = {}
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
