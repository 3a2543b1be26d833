"""The docs name only things that exist: recipe keys with values and defaults, commands, files, names, metrics, anchors.

Each check takes a page's text and returns problems. The last tests give every check a wrong text.
"""

import argparse
import ast
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from sources import nodes

from understudy.cli.main import _parser
from understudy.config import Recipe
from understudy.config.base import unwrap

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "understudy"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("docs/*.md")),
    *(ROOT / "docs" / "reference" / name for name in ("keys.md", "errors.md")),
]
NAMES_OF_OTHER_PROJECTS = {
    "staleness_threshold", "trigger_parameter_sync_step", "partial_rollout", "require_batches", "ppo_mini_batch_size",
    "evict_first", "AutoModelForCausalLM",
}  # fmt: skip
"""Names of verl, Triton and transformers that pages mention outside of a table's first column."""
METRIC_ROOTS = "actor|async|critic|perf|response_length|rollout|rollout_corr|rows|teacher|time|training|val"


def fences(text: str, language: str = r"\w*") -> list[str]:
    return re.findall(rf"^```(?:{language})\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def prose(text: str) -> str:
    """The text without fenced blocks, and without the left column of tables that translate from verl or TRL."""
    left = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    others = text.startswith("# Coming from ")
    return re.sub(r"^\|[^|]*\|", "|", left, flags=re.MULTILINE) if others else left


def spans(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", prose(text))


# Recipe keys


def field_at(path: str) -> FieldInfo | Any:
    """The field at this path, or a section or `Any`; `KeyError` if there is none."""
    current: Any = Recipe
    for part in path.split("."):
        if isinstance(current, FieldInfo):
            current = unwrap(current.annotation)
            if get_origin(section := getattr(current, "section", None)) is dict or section is Any:
                return Any  # an agent loop's own options
            if section is not None:
                current = section
                continue  # this part is a name that the user chooses
        if not (isinstance(current, type) and issubclass(current, BaseModel)):
            raise KeyError(part)
        if part == "*":
            return Any
        current = current.model_fields[part]
    return current


def wrong_key(path: str, value: Any = ...) -> str | None:
    try:
        if path.startswith("cluster.roles."):
            (roles, _) = get_args(field_at("cluster.roles").annotation)
            assert get_origin(roles) is Literal
            return None if path.split(".")[2] in get_args(roles) else f"no role {path}"
        field = field_at(path)
        if value is not ... and isinstance(field, FieldInfo):
            TypeAdapter(field.rebuild_annotation()).validate_python(value)
    except KeyError:
        return f"no recipe key {path}"
    except ValidationError as error:
        return f"{path} = {value!r}: {error.errors()[0]['msg']}"
    return None


def leaves(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict) and f"{prefix}{key}" != "rollout.agent_options":
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


SECTION = "|".join(Recipe.model_fields)


def keys(text: str) -> list[str]:
    found: list[tuple[str, Any]] = []
    for block in fences(text, "toml"):
        found += leaves(tomllib.loads(block))
    for block in fences(text):
        found += [(path, ...) for path in re.findall(rf"\b((?:{SECTION})(?:\.\w+)+)=", block)]
    for span in spans(text):
        if header := re.fullmatch(rf"\[((?:{SECTION})[\w.]*)\](?: (\w+) = .*)?", span):
            found.append((".".join(filter(None, header.groups())), ...))
        elif dotted := re.fullmatch(rf"((?:{SECTION})\.[\w*.]+)((?: / \w+)*)(?: = (.+)| [≥>] .*)?", span):
            path, siblings, value = dotted.groups()
            if not path.endswith((".py", ".md", "_*")):
                found.append((path, toml_value(value)))
                found += [(f"{path.rpartition('.')[0]}.{name}", ...) for name in re.findall(r"\w+", siblings)]
    for cell in re.findall(r"^\| ([^|]*`[^|]*) \|", prose(text), re.MULTILINE):
        found += siblings_in(cell)
    return [problem for path, value in found if (problem := wrong_key(path, value))]


def siblings_in(cell: str) -> Iterator[tuple[str, Any]]:
    """In a table's first cell, names after a whole key are keys of its section: `trainer.ranks`,
    `micro_batch_tokens`."""
    section = ""
    for span in re.findall(r"`([^`]+)`", cell):
        if dotted := re.match(rf"((?:{SECTION})(?:\.[\w*]+)*)\.[\w*]+", span):
            section = dotted[1]
        elif (
            section
            and (bare := re.fullmatch(r"([a-z]\w+)(?: = .*)?", span))
            and bare[1] not in Recipe.model_fields
        ):
            yield f"{section}.{bare[1]}", ...


def toml_value(text: str | None) -> Any:
    try:
        return ... if text is None else tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return ...


def defaults(text: str) -> list[str]:
    """`| key | default |` tables, and `some.key` followed by its default in brackets."""
    claimed = re.findall(rf"`((?:{SECTION})\.[\w.]+)`[^`|()\n]{{0,60}} \((\d+)[;)]", text)
    for table in re.findall(r"^\| key \| default \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE):
        claimed += re.findall(r"^\| `([\w.]+)` \| ([^|]+?) \|", table, re.MULTILINE)
    return [
        f"{path}: its default is {field.default!r}, not {value}"
        for path, value in claimed
        if isinstance(field := field_at(path), FieldInfo) and field.default != toml_value(value)
    ]


# Commands


@cache
def commands() -> dict[str, argparse.ArgumentParser]:
    (action,) = (one for one in _parser()._actions if isinstance(one, argparse._SubParsersAction))
    return dict(action.choices)


def commands_and_flags(text: str) -> list[str]:
    problems = []
    for block in fences(text):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("make "):
                problems += wrong_target(line.split()[1])
            if called := re.search(r"(?<![\w/.\"`])understudy ([a-z][\w-]+.*)", line.partition(" #")[0]):
                problems += wrong_call(called[1])
    for span in spans(text):
        if span.startswith("make "):
            problems += wrong_target(span.split()[1])
        if called := re.match(r"understudy ([a-z][\w-]*)(.*)", span):
            known = commands().get(called[1])
            flags = re.findall(r"(?<!\S)(--[a-z-]+)", called[2])
            if known is None:
                problems.append(f"no command {called[1]}")
            else:
                problems += [
                    f"{span}: no {flag}" for flag in flags if flag not in known._option_string_actions
                ]
        elif flag := re.match(r"--[a-z][\w-]+", span):
            problems += [] if flag[0] in source() else [f"nobody knows {flag[0]}"]
    return problems


def wrong_target(name: str) -> list[str]:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return [] if name in targets else [f"no make {name}"]


def wrong_call(line: str) -> list[str]:
    try:
        left = _parser().parse_known_args(shlex.split(line))[1]
    except SystemExit:
        return [f"understudy {line}: is no call"]
    return [f"understudy {line}: no {word}" for word in left if "=" not in word or word.startswith("-")]


# Files and names in the code


@cache
def source() -> str:
    folders = ("src", "tests", "benchmarks", "recipes", "examples")
    own = [
        path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")) if path != Path(__file__)
    ]
    return "\n".join(path.read_text() for path in [*own, ROOT / "pyproject.toml", ROOT / "Makefile"])


@cache
def words() -> frozenset[str]:
    return frozenset(re.findall(r"\w+", source())) | NAMES_OF_OTHER_PROJECTS


@cache
def classes() -> dict[str, set[str]]:
    """Every class with the names of its methods and annotated fields."""
    found: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                names = found.setdefault(node.name, set())
                for inner in ast.walk(node):
                    if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                        names.add(inner.name)
                    elif isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
                        names.add(inner.target.id)
    return found


def file_of(name: str) -> Path | None:
    for base in (ROOT, ROOT / "docs", SOURCE):
        if (base / name).exists():
            return base / name
    if "/" in name:
        return None
    return next(
        (path for top in ("src", "tests", "recipes", "benchmarks") for path in (ROOT / top).rglob(name)), None
    )


@cache
def is_of_a_run(name: str) -> bool:
    """Whether the code names such a file, so that a run may write it."""
    last = name.strip("/").rpartition("/")[2]
    if name.endswith((".py", ".toml", ".md")) or last not in source():
        return False
    return re.search(rf"(?<![\w-]){re.escape(last)}(?![\w-])", source()) is not None


def files(text: str) -> list[str]:
    problems = []
    for span in spans(text):
        word = span.removeprefix("python ").split(" ")[0].removesuffix(":")
        if not re.fullmatch(r"(?!/|.*NNNN)[\w./-]+(?:\.(py|toml|md|jsonl|json|png|html)|(?<=\w)/)", word):
            continue
        found = file_of(word)
        if found is None and not is_of_a_run(word):
            problems.append(f"no file {word}")
        elif found is not None and (inside := re.fullmatch(r"\S+\.py: (\w+)", span)):
            own = re.findall(r"^\s*(?:async )?(?:def|class) (\w+)", found.read_text(), re.MULTILINE)
            problems += [] if inside[1] in own else [f"no {inside[1]} in {word}"]
    return problems


def names(text: str) -> list[str]:
    problems = []
    for span in spans(text):
        for module, name in re.findall(r"\bunderstudy\.([a-z_.]+)[.:](\w+)", span):
            problems += wrong_import(f"understudy.{module}", name)
        if dotted := re.match(r"(?:[a-z_]+\.)*([A-Z][A-Za-z]+)\.([a-z]\w+)", span):
            known = classes().get(dotted[1], {dotted[2]})
            problems += [] if dotted[2] in known else [f"no {dotted[0]}"]
        for word in re.findall(
            r"(?<![\w/.-])(?:[a-z]+(?:_[a-z0-9]+)+|[A-Z][a-z]+(?:[A-Z][a-z]+)+)(?![\w/-]|\.py)", span
        ):
            if word not in words():
                problems.append(f"no {word} anywhere")
    return problems


def snippets(text: str) -> list[str]:
    problems = []
    for block in fences(text, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module:
                for name in node.names:
                    problems += wrong_import(node.module, name.name)
    return problems


def wrong_import(module: str, name: str) -> list[str]:
    if module.partition(".")[0] != "understudy":
        return [] if find_spec(module.partition(".")[0]) else [f"no {module}"]
    path = SOURCE.parent / module.replace(".", "/")
    file = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
    defined = rf"^(?:(?:async )?(?:def|class) )?{name}\b"
    there = file.exists() and re.search(defined, file.read_text(), re.MULTILINE)
    return [] if there or (path / f"{name}.py").exists() else [f"no {name} in {module}"]


# Metrics, anchors, beginnings


@cache
def strings() -> tuple[frozenset[str], re.Pattern[str]]:
    """Words of the string literals of the source, and a pattern of every name with a slash that they can make."""
    literals: list[str] = []
    made: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        for node in nodes(path):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                literals.append(node.value)
                made.add(re.escape(node.value))
            elif isinstance(node, ast.JoinedStr):
                parts = [
                    re.escape(str(part.value)) if isinstance(part, ast.Constant) else ".+"
                    for part in node.values
                ]
                made.add("".join(parts))
    patterns = sorted(one for one in made if re.match(rf"(?:{METRIC_ROOTS})/|.*\.\+_(?:min|max)$", one))
    known = {word.lower() for word in re.findall(r"\w+", "\n".join(literals))}
    return frozenset(known | {name.lower() for name in classes()}), re.compile("|".join(patterns))


def metrics(text: str) -> list[str]:
    known, made = strings()
    problems = []
    for span in (re.sub(r"/[A-Z]+$", "", one) for one in spans(text)):
        if not re.fullmatch(rf"(?:{METRIC_ROOTS})(?:/[\w@ +-]+)+", span) or (SOURCE / span).exists():
            continue
        parent, _, last = span.rpartition("/")
        last = re.sub(r"_(?:min|max)$|@\w+$", "", last)
        if not (made.fullmatch(span) or made.fullmatch(parent)) or not (
            last in known or re.match(r"\d", last) or " " in last
        ):
            problems.append(f"no metric {span}")
    return problems


def anchors(text: str, page: Path) -> list[str]:
    problems = []
    for file, anchor in re.findall(r"\]\((?!http)([^)#\s]*)#([^)\s]+)\)", text):
        target = page.parent / file if file else page
        titles = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
        if anchor not in [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]:
            problems.append(f"{file} has no #{anchor}")
    return problems


CHECKS: list[Callable[[str], list[str]]] = [
    keys, defaults, commands_and_flags, files, names, snippets, metrics,
]  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_page_names_only_things_that_exist(page: Path) -> None:
    text = page.read_text()
    assert [problem for check in CHECKS for problem in check(text)] + anchors(text, page) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_page_begins_with_a_sentence_of_text(page: Path) -> None:
    first = page.read_text().split("\n\n")[1]
    assert re.match(r"[\w`*]", first), f"{page.name} does not say what it is about: {first[:60]}"


@pytest.mark.parametrize(
    ("check", "wrong"),
    [
        (keys, "`trainer.stepz`"),
        (keys, "`teachers.*.modle`"),
        (keys, "`cluster.roles.judge`"),
        (keys, "`[loss.corection]`"),
        (keys, '`loss.kind = "foward_kl"`'),
        (keys, "| `trainer.ranks`, `micro_batch_words` | rounding |"),
        (keys, '```toml\n[rollout]\nengin = "hf"\n```\n'),
        (keys, "```bash\nunderstudy train recipe.toml trainer.step=3\n```\n"),
        (defaults, "`cluster.restarts.rollout` times in a row (6), then"),
        (defaults, "| key | default |\n|---|---|\n| `trainer.checkpoint_every` | 51 |\n"),
        (commands_and_flags, "`understudy veiw RUN`"),
        (commands_and_flags, "`understudy eval RUN --bets`"),
        (commands_and_flags, "```bash\nunderstudy export RUN out --averagd\n```\n"),
        (commands_and_flags, "```\nunderstudy replay\n```\n"),
        (commands_and_flags, "`make tests`"),
        (commands_and_flags, "`--max-kk`"),
        (files, "`teacher/scorre.py`"),
        (files, "`engines/servers/vllm_sides/`"),
        (files, "`metrics.json`"),
        (files, "`trainers/learn/update.py: lern`"),
        (names, "`TeacherPool.scores_all`"),
        (names, "`TeacherPoool`"),
        (names, "`hedge_after_secs`"),
        (names, "`understudy.assembly.teachers.admin.ask_runs(path)`"),
        (snippets, "```python\nfrom understudy.losses.objective import Objectiv\n```\n"),
        (metrics, "`perf/model_tflop`"),
        (metrics, "`rollout_corr/ratio_mid`"),
        (metrics, "`val/pas@4`"),
    ],
)
def test_each_check_finds_a_wrong_name(check: Callable[[str], list[str]], wrong: str) -> None:
    assert check(f"# A page\n\nIt says {wrong}." if wrong.startswith("`") and "```" not in wrong else wrong)


def test_a_wrong_anchor_is_found() -> None:
    assert anchors("[there](running.md#stoping)", ROOT / "docs" / "tour.md")
