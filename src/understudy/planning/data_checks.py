"""Checks of dataset rows for `understudy check`: teachers, agent loops, prompt lengths.

Every problem names the file and the row. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from tokenizers import Tokenizer
from tokenizers import __version__ as tokenizers_version

from understudy.config import Recipe
from understudy.config.base import nearest
from understudy.errors import DataError
from understudy.planning.models.folder import ModelFolder
from understudy.planning.overlong import Overlong, PromptLimits, settle_overlong
from understudy.planning.teacher_checks import Measure, Measured, scores_row
from understudy.rollout.agents.registry import LoopChoice, Schemas
from understudy.rollout.dataset import COMPLETION, Dataset, Row, content_of, picture_sources
from understudy.rollout.teacher_prompts import TeacherPrompt
from understudy.rollout.template_bounds import BoundedEnvironment
from understudy.rollout.template_date import NOW, on_day, strftime_now
from understudy.rollout.template_deadline import within
from understudy.types.prompt import Prompt, teacher_key_of

_SHOWN = 3


@dataclass
class CheckedRows:
    """One dataset after its checks."""

    dataset: Dataset
    """Without the rows that `data.overlong = "drop"` removes."""
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check_rows(
    recipe: Recipe,
    dataset: Dataset,
    role: str,
    limits: PromptLimits,
    measure: Measure | None,
    advance: Callable[[int], None],
) -> CheckedRows:
    """Checks one dataset. `role` is the recipe key that names it; `advance` is called for every row
    checked."""
    checked = CheckedRows(dataset, [*_agents(recipe, dataset, role), *_routes(recipe, dataset, role)])
    if split := dataset.split_answers:
        checked.notes.append(
            f"{role}: {split} of {len(dataset)} chats end with an assistant message; the student writes that message anew, and the given "
            f"one is the row's column `{COMPLETION}`"
        )
    if measure is None or checked.problems:
        return checked
    overlong = Overlong(role, recipe.data.overlong, limits)
    for number, row in enumerate(dataset.rows):
        advance(1)
        try:
            found = measure(row)
        except DataError as error:
            checked.problems.append(f"{role}: {dataset.place(number)} {error}")
            return checked
        overlong.see(number, row, found.length if found else 0)
    try:
        checked.dataset, notes = settle_overlong(overlong, dataset, recipe.data, recipe.rollout)
        checked.notes += notes
    except DataError as error:
        checked.problems.append(str(error))
    return checked


def _agents(recipe: Recipe, dataset: Dataset, role: str) -> list[str]:
    """Rows may only name loops that ship or that the recipe names: data must not decide which code runs."""
    rollout = recipe.rollout
    known = LoopChoice.known(rollout.agent, rollout.agent_options)
    problems = []
    for number, row in enumerate(dataset.rows):
        name = row.get("agent") or rollout.agent
        if name not in known:
            guess = nearest(str(name), known)
            hint = f"; did you mean {guess!r}?" if guess else ""
            if ":" in str(name):
                hint += f" (to allow it, add [rollout.agent_options.{json.dumps(name)}] to the recipe)"
            problems.append(
                f"{role}: {dataset.place(number)} asks for the agent loop {name!r}; rows may name {', '.join(sorted(known))}{hint}"
            )
        elif name == "tool" and isinstance(content_of(row), str):
            problems.append(
                f"{role}: {dataset.place(number)} is plain text (`prompt`), and the tool loop reads chats: tools are told to the student "
                'by its chat template. Give the row `messages` ([{"role": "user", "content": "…"}])'
            )
        elif name == "tool" != rollout.agent and not rollout.agent_options.get("tool", {}).get("tools"):
            problems.append(
                f"{role}: {dataset.place(number)} asks for the tool loop (`agent`, or verl's tool_agent), and the recipe names no tools "
                'for it; set rollout.agent_options.tool.tools, for example ["calculator"]'
            )
            break
        if len(problems) == _SHOWN:
            break
    return problems


def _routes(recipe: Recipe, dataset: Dataset, role: str) -> list[str]:
    """Every row must have a teacher. A sole teacher scores every row, unless its key excludes the row."""
    keys = {teacher.key for teacher in recipe.teachers.values()} - {None}
    if not keys or recipe.data.default_teacher:
        return []
    sole = next(iter(recipe.teachers)) if len(recipe.teachers) == 1 else None
    way_out = (
        f"leave teachers.{sole}.key out (understudy.distill: give the model alone), and it scores every row"
        if sole
        else "set data.default_teacher to send the rest to one"
    )
    column, mixture = recipe.data.teacher_key, recipe.data.mixture_key
    first: dict[str | None, int] = {}
    for number, row in enumerate(dataset.rows):
        value = teacher_key_of(row.get(column))
        if row.get(mixture) is None and value not in keys and not (sole and not value):
            first.setdefault(value, number)
    problems = []
    for value in sorted(first, key=str):
        guess = nearest(str(value), [str(key) for key in keys])
        hint = f"; did you mean {guess!r}?" if guess else ""
        problems.append(
            f"{role}: rows with {column} = {value!r} have no teacher; teachers take {sorted(map(str, keys))}{hint} "
            f"({way_out}); the first is {dataset.place(first[value])}"
        )
    return problems[:_SHOWN]


def measured_once(measure: Measure) -> Measure:
    """Caches a measure: rendering and tokenizing take most of a check's time, and two checks need the
    lengths."""
    known: dict[int, tuple[Mapping[str, Any], Measured | None]] = {}

    def remembered(row: Mapping[str, Any]) -> Measured | None:
        if id(row) not in known:
            known[id(row)] = (row, measure(row))  # the row is kept alive, so that its id is not reused
        return known[id(row)][1]

    return remembered


def length_of_own(prompt: TeacherPrompt, length: Measure | None) -> Measure:
    """The tokens of a teacher's own prompt; None if the student's tokenizer is not known."""

    def measure(row: Row) -> Measured | None:
        seen = prompt.of_row(row)
        return None if length is None else length(seen)

    return measure


def clipped(measure: Measure | None, limits: PromptLimits, rule: str) -> Measure | None:
    """The lengths of prompts as they are sent: truncated ones with `data.overlong = "truncate_left"`."""
    if measure is None or rule != "truncate_left":
        return measure

    def cut(row: Row) -> Measured | None:
        found = measure(row)
        limit = limits.of(row)
        return Measured(limit) if found and limit is not None and found.length > limit else found

    return cut


Lacked = Mapping[str, Mapping[int, str]]
"""By model of the run: the student's tokens that it lacks, by id."""


def tokens_fit(
    recipe: Recipe, dataset: Dataset, measure: Measure, lacked: Lacked, teacher: str | None = None
) -> CheckedRows:
    """Finds the rows of data.train whose prompt holds a token that a model of the run lacks; no teacher scores
    them. `teacher`: the prompt is this teacher's own. Placeholders of pictures are no such tokens."""
    checked = CheckedRows(dataset)
    found: dict[int, int] = {}
    for number, row in enumerate(dataset.rows):
        if picture_sources(row) or (teacher and not scores_row(recipe.data, recipe.teachers, teacher, row)):
            continue
        with suppress(DataError):  # a prompt that cannot be rendered is reported elsewhere
            if (one := measure(row)) and one.lacked is not None:
                found[number] = one.lacked
    if not found:
        return checked
    first, token = next(iter(found.items()))
    owners = [place for place, tokens in lacked.items() if token in tokens]
    prompt = f"the prompt of teachers.{teacher} for" if teacher else "the prompt of"
    line = (
        f"data.train: {prompt} {dataset.place(first)} holds {lacked[owners[0]][token]!r} (id {token}), which {', '.join(owners)} "
        f"lacks, so the row cannot be scored ({len(found)} of {len(dataset)} rows)"
    )
    if len(found) > recipe.trainer.max_dead_letters * len(dataset):
        checked.problems.append(
            f"{line}; choose a model that has the token, or leave it out of the rows and of the student's chat template "
            "(rollout.template_options)"
        )
    else:
        checked.notes.append(f"{line}; each becomes a dead letter")
    return checked


def _to_json(value: Any, **given: Any) -> str:
    """As in transformers. Jinja's own escapes < > & ' for HTML."""
    return json.dumps(value, **{"ensure_ascii": False, **given})


class GenerationTag(Extension):
    """`{% generation %} … {% endgeneration %}`, with which templates mark for transformers what the model writes. Their text
    is rendered as it stands; the scope of variables is that of transformers' tag."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_written"), [], [], body).set_lineno(line)

    def _written(self, caller: Callable[[], str]) -> str:
        return caller()


def whole_texts(model: ModelFolder) -> Tokenizer:
    """Its tokenizer without the truncation and padding that trainers leave in tokenizer.json: transformers, by which a
    run tokenizes, applies them only where asked."""
    file = model.path / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises no narrower class
        raise DataError(
            f"{file} cannot be read by tokenizers {tokenizers_version} ({error}); download or copy it again, or upgrade tokenizers"
        ) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def prompt_length(
    student: ModelFolder,
    recipe: Recipe,
    schemas: Schemas | None = None,
    lacked: Collection[int] = frozenset(),
    owner: str = "the student",
    own_template: bool = False,
) -> Measure:
    """Counts the tokens of a row's rendered prompt, without importing transformers (which imports torch).
    `schemas` gives the tools that the row's agent loop shows to the student; `lacked` are the ids to look
    for. `owner`: the model whose folder it is, for errors. `own_template`: a teacher with another tokenizer,
    which does without the recipe's `chat_template`."""
    tokenizer = whole_texts(student)
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = refuse
    environment.globals[NOW] = strftime_now
    options = recipe.rollout.template_options
    templates = _Templates(
        environment, student, owner, None if own_template else options.get("chat_template")
    )
    tokens, ids = student.vocabulary.tokens(), student.special_ids
    special = {
        role: "" if (number := ids[role]) is None else tokens.get(number, "")
        for role in ("bos_token", "eos_token", "pad_token")
    }

    # As transformers does: `chat_template` chooses the template, which does not see it.
    given = special | {name: one for name, one in options.items() if name != "chat_template"}

    def render(row: Row) -> tuple[str, bool]:
        content = content_of(row)
        tools = schemas(Prompt("", 0, 0, "", columns=row)) if schemas else None
        if isinstance(content, str):
            return content, True
        tools = tools or row.get("tools") or None
        name = next((one for one in tools or () if isinstance(one, str)), None)
        if name and (row.get("agent") or recipe.rollout.agent) == "single_turn":
            raise DataError(
                f"names the tool {name!r} (`tools`), and the agent loop single_turn has no schema of it for the chat template; give "
                'the row agent = "tool", or the schema of the tool in place of its name'
            )
        # As transformers does. `'tool_calls' in message` is true of a null too.
        chat = [{name: one for name, one in message.items() if one is not None} for message in content]
        template = templates.of(with_tools=bool(tools))
        with within(), on_day(recipe.rollout.template_date):
            return template.render(messages=chat, tools=tools, add_generation_prompt=True, **given), False

    def measure(row: Row) -> Measured | None:
        try:
            text, plain = render(row)
        except DataError:
            raise
        except Exception as error:  # a template is a program: it may raise anything
            reason = (
                str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
            )
            raise DataError(f"cannot be rendered by {owner}'s chat template: {reason}") from None
        try:
            ids = tokenizer.encode(text, add_special_tokens=plain).ids
        except Exception as error:  # a text that the tokenizer cannot read
            raise DataError(f"cannot be tokenized: {type(error).__name__}: {error}") from None
        return Measured(len(ids), next((one for one in ids if one in lacked), None) if lacked else None)

    return measure


class _Templates:
    """The chat templates of a model, compiled for the first row that needs them.

    `chosen` is the recipe's `rollout.template_options.chat_template`: a template's name or a whole template."""

    def __init__(
        self, environment: jinja2.Environment, folder: ModelFolder, owner: str, chosen: Any = None
    ) -> None:
        self._environment, self._folder, self._owner, self._chosen = environment, folder, owner, chosen
        self._known: dict[str, jinja2.Template | str] = {}
        """By source; a text says why one cannot be compiled."""

    def of(self, *, with_tools: bool) -> jinja2.Template:
        """The one that transformers takes for a chat with or without tools."""
        source = self._source(with_tools)
        if source not in self._known:
            self._known[source] = self._compiled(source)
        found = self._known[source]
        if isinstance(found, str):
            raise DataError(found)
        return found

    def _source(self, with_tools: bool) -> str:
        names = self._folder.chat_templates
        if self._chosen is not None:
            return self._chosen_source(names)
        name = "tool_use" if with_tools and "tool_use" in names else "default"
        if name not in names:
            others = f"none named `default`, only {', '.join(sorted(names))}; rename one" if names else ""
            raise jinja2.TemplateError(
                f"the tokenizer has {others or 'no chat template; give `prompt` instead of `messages`, or add one'}"
            )
        return names[name]

    def _chosen_source(self, names: Mapping[str, str]) -> str:
        """transformers takes a text that names none of several templates for a template, and would render it as it stands."""
        chosen, several = self._chosen, names.keys() - {"default"}
        if several and isinstance(chosen, str) and chosen in names:
            return names[chosen]
        if isinstance(chosen, str) and "{" in chosen:
            return chosen
        known = f"has {', '.join(sorted(names))}" if several else "has no templates with names"
        raise DataError(
            f"cannot be rendered: rollout.template_options.chat_template = {chosen!r} is not a template, and the tokenizer of "
            f"{self._owner} {known}; give one of its names, a template's text, or leave it out"
        )

    def _compiled(self, source: str) -> jinja2.Template | str:
        place = f"the chat template of {self._owner} ({self._folder.path})"
        if source == self._chosen:
            place = "rollout.template_options.chat_template"
        try:
            return self._environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            return (
                f"cannot be rendered: {place} is not Jinja that transformers "
                f"reads: {error.message} (line {error.lineno}); mend the template"
            )
