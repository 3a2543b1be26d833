"""Checks of rows against teachers before the run: context lengths, mixtures, signals.

Imports no torch: `understudy check` runs this.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from understudy.config import DataConfig, Recipe, TeacherConfig
from understudy.errors import DataError
from understudy.planning.models.folder import ModelFolder
from understudy.planning.resolved import workers_write_rows
from understudy.planning.seating import ROLLOUT
from understudy.rollout.dataset import COMPLETION, Dataset, answer_text
from understudy.rollout.teacher_prompts import TeacherPrompt
from understudy.types.prompt import teacher_key_of

Row = Mapping[str, Any]


class Measured(NamedTuple):
    """A row's prompt in the student's tokens."""

    length: int
    lacked: int | None = None
    """The first of its ids that a model of the run has no token for."""


Measure = Callable[[Row], Measured | None]
"""None if the student's tokenizer is not known."""
_CLOSED_SIGNALS = ("sampled", "topk")
"""The signals that servers other than ours can give."""
_CONNECT_SECONDS = 3
_NEIGHBOURS = {
    "trainer": "the trainer's process",
    "engine": "the engine's processes beside the trainer (give them a pool: cluster.roles.rollout)",
}


@dataclass
class SilentServers:
    """Running servers that the recipe names and that accept no connection, one line each."""

    wrong: list[str] = field(default_factory=list)
    """Their addresses name no host."""
    silent: list[str] = field(default_factory=list)
    """They may not be up yet: the start of a run waits for them."""


def silent_servers(recipe: Recipe) -> SilentServers:
    named = {f"teachers.{name}.urls": teacher.urls for name, teacher in recipe.teachers.items()}
    named["rollout.urls"] = recipe.rollout.urls
    found = SilentServers()
    for place, urls in named.items():
        for url in urls:
            error = _unreachable(url)
            if error is None:
                continue
            late = isinstance(error, TimeoutError)
            why = f"no answer within {_CONNECT_SECONDS} s" if late else _reason(error)
            line = (
                f"{place}: no server accepts connections at {url} ({why}); start it, or correct the address"
            )
            lasting = isinstance(error, socket.gaierror | ValueError)
            (found.wrong if lasting else found.silent).append(line)
    return found


def _unreachable(url: str) -> OSError | ValueError | None:
    """Why no connection to this address can be made; None if one can."""
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        with socket.create_connection((parts.hostname or "", port), timeout=_CONNECT_SECONDS):
            return None
    except (OSError, ValueError) as error:
        return error


def _reason(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or str(error)


def ports_free(teacher: str, ports: Sequence[int]) -> list[str]:
    """Problems of ports that a teacher's replicas cannot listen on."""
    problems = []
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except (OSError, OverflowError) as error:
                problems.append(
                    f"teachers.{teacher}.ports: port {port} cannot be used ({error}); choose another, or leave `ports` out"
                )
    return problems


def own_prompts(teachers: Mapping[str, TeacherConfig]) -> dict[str, TeacherPrompt]:
    """The teachers that read a prompt of their own."""
    return {
        name: TeacherPrompt(name, one.prompt, one.prompt_column)
        for name, one in teachers.items()
        if one.reads_own_prompt
    }


def sessions_can_be_shown(recipe: Recipe, prompts: Mapping[str, TeacherPrompt]) -> list[str]:
    """Problems of prompts that show what became of a session."""
    problems = []
    for name, prompt in prompts.items():
        place = f"teachers.{name}.prompt"
        if "solution" in prompt.session_facts and recipe.rollout.n == 1:
            problems.append(
                f"{place} shows session.solution, the right answer of another session of the same prompt, and rollout.n = 1; "
                "set rollout.n above 1"
            )
        if prompt.session_facts and workers_write_rows(recipe):
            problems.append(
                f"{place} shows `session`, which the trainer does not have if workers on other machines write rows; set "
                "dataplane.backend = 'embedded', or leave `session` out"
            )
    return problems


def sessions_are_rewarded(recipe: Recipe, dataset: Dataset) -> list[str]:
    """Problems of prompts that show facts of a session which nothing in the run makes. A user's loops and environments
    may give rewards themselves."""
    if recipe.data.reward is not None:
        return []
    problems = []
    for name, prompt in own_prompts(recipe.teachers).items():
        loops = {
            row.get("agent") or recipe.rollout.agent
            for row in dataset.rows
            if scores_row(recipe.data, recipe.teachers, name, row)
        }
        if not loops:
            continue
        missing = {"reward", "solution"} if loops <= {"single_turn", "tool"} else set()
        missing |= {"feedback"} if loops <= {"single_turn"} else set()
        if shown := sorted(prompt.session_facts & missing):
            problems.append(
                f"teachers.{name}.prompt shows session.{shown[0]}, which comes from a reward, and there is none; set data.reward, or leave "
                f"session.{shown[0]} out"
            )
    return problems


def prompts_render(recipe: Recipe, dataset: Dataset, own: Mapping[str, Measure]) -> list[str]:
    """Every row must give the teachers that score it their own prompts; the first that does not is named."""
    problems = []
    for name, measure in own.items():
        for number, row in enumerate(dataset.rows):
            try:
                if scores_row(recipe.data, recipe.teachers, name, row):
                    measure(row)
            except DataError as error:
                problems.append(f"data.train: {dataset.place(number)}: {error}")
                break
    return problems


def contexts_of(teachers: Mapping[str, TeacherConfig], folders: Mapping[str, ModelFolder]) -> dict[str, int]:
    """The tokens that a sequence may have at each teacher that the run starts, where that is known."""
    known = {name: (folder.context, teachers[name].context_length) for name, folder in folders.items()}
    return {name: min(one for one in both if one) for name, both in known.items() if any(both)}


def contexts_fit(
    recipe: Recipe,
    dataset: Dataset,
    folders: Mapping[str, ModelFolder],
    measure: Measure | None,
    own_prompts: Mapping[str, Measure] | None = None,
) -> list[str]:
    """Every teacher's context must hold prompt + response + 1 of the rows it scores; the message shows the
    sum. `own_prompts`: the lengths of the prompts of teachers that do not read the student's."""
    problems = []
    for name, folder in folders.items():
        own, wanted = folder.context, recipe.teachers[name].context_length
        if own and wanted and wanted > own:
            problems.append(
                f"teachers.{name}.context_length = {wanted}: {folder.path.name} holds {own} positions; lower it"
            )
    holds = contexts_of(recipe.teachers, folders)
    if problems or not holds:
        return problems
    rows = dataset.rows
    students = _lengths(rows, measure)
    for name, room in holds.items():
        lengths = _lengths(rows, own_prompts[name]) if own_prompts and name in own_prompts else students
        mine = [
            number for number, row in enumerate(rows) if scores_row(recipe.data, recipe.teachers, name, row)
        ]
        needs = {number: lengths[number] + recipe.rollout.max_new_tokens + 1 for number in mine}
        over = [number for number in mine if needs[number] > room]
        if over:
            worst = max(over, key=lambda number: needs[number])
            prompt = (
                f"{lengths[worst]} (prompt of {dataset.place(worst)})"
                if measure
                else "1 (the shortest prompt)"
            )
            problems.append(
                f"teachers.{name} holds {room} tokens; {prompt} + {recipe.rollout.max_new_tokens} (rollout.max_new_tokens) + 1 = "
                f"{needs[worst]}, {needs[worst] - room} too many"
                + (f"; {len(over)} of its {len(mine)} rows do not fit" if measure else "")
                + ". Lower rollout.max_new_tokens, shorten prompts, or choose a teacher with a longer context"
                + _limit_of_prompts(
                    room - recipe.rollout.max_new_tokens - 1, lengths is students and measure is not None
                )
            )
    return problems


def _limit_of_prompts(limit: int, by_the_students: bool) -> str:
    """The keys that drop or truncate the prompts that a teacher cannot hold."""
    if not by_the_students or limit < 1:
        return ""
    return f"; data.max_prompt_tokens = {limit} with data.overlong = 'drop' or 'truncate_left' leaves out what does not fit"


def answers_given(recipe: Recipe, dataset: Dataset) -> list[str]:
    """Every row must have the answer that `rollout.off_policy` may take; the first that has none is named."""
    share, column = recipe.rollout.off_policy, recipe.rollout.answer_column
    if share == 0:
        return []
    for number, row in enumerate(dataset.rows):
        place = f"data.train: {dataset.place(number)}"
        try:
            answer_text(row.get(column))
        except ValueError as error:
            other = (
                f"; the row has `{COMPLETION}`: rollout.answer_column = {COMPLETION!r}"
                if row.get(COMPLETION)
                else ""
            )
            return [
                f"{place}: no text in the column {column!r} ({error}), from which rollout.off_policy = {share:g} takes answers; add it, or "
                f"name another column (rollout.answer_column){other if column != COMPLETION else ''}"
            ]
        if row.get("agent") not in (None, "", "single_turn"):
            return [
                f"{place}: agent = {row['agent']!r} with rollout.off_policy = {share:g}: a given answer is one turn; use 'single_turn', or "
                "off_policy = 0"
            ]
    return []


def mixtures_fit(recipe: Recipe, dataset: Dataset) -> list[str]:
    """Mixtures need a signal that can be mixed. A wrong teacher name fails only its row, when that row is
    scored."""
    column, signal = recipe.data.mixture_key, recipe.loss.signal
    mixed = [number for number, row in enumerate(dataset.rows) if row.get(column) is not None]
    if not mixed or recipe.loss.distill_coef == 0:
        return []
    where = f"data.train has {len(mixed)} rows with a mixture of teachers (`{column}`, the first is {dataset.place(mixed[0])})"
    if signal == "hidden":
        return [
            f"{where}, and loss.signal = 'hidden' cannot be mixed: a mixture is not the softmax of one head over one "
            "hidden state; use 'topk' or 'sampled'"
        ]
    closed = [
        name for name, teacher in recipe.teachers.items() if teacher.backend in ("vllm", "sglang", "openai")
    ]
    if signal == "topk" and closed:
        return [
            f"{where}; with loss.signal = 'topk' every teacher of a mixture is also asked at the others' candidates, which "
            f"{', '.join(closed)} (backend = {recipe.teachers[closed[0]].backend!r}) cannot tell; use 'sampled'"
        ]
    return []


def bases_fit(recipe: Recipe) -> list[str]:
    """A teacher in the trainer's process answers on its loopback, which other machines do not reach; so do engine processes
    beside the trainer. Those in a pool answer at their machine's address."""
    if not workers_write_rows(recipe):
        return []
    return [
        f"teachers.{name}.placement = {teacher.placement!r}: workers on other machines ask teachers themselves, and cannot reach "
        f"{_NEIGHBOURS[teacher.placement]}; use 'standalone', or dataplane.backend = 'embedded'"
        for name, teacher in recipe.teachers.items()
        if teacher.placement == "trainer"
        or (teacher.placement == "engine" and ROLLOUT not in recipe.cluster.roles)
    ]


def offloads_fit(teachers: Mapping[str, TeacherConfig], folders: Mapping[str, ModelFolder]) -> list[str]:
    """Problems of teachers that keep more layers in host memory than they have."""
    counts = {name: len(folder.layer_parameters) for name, folder in folders.items()}
    return [
        f"teachers.{name}.offload = {wanted}: the model has {count} layers; lower it, or set 'all'"
        for name, count in counts.items()
        if isinstance(wanted := teachers[name].offload, int) and wanted > count > 0
    ]


def signals_fit(recipe: Recipe) -> list[str]:
    """Problems of teachers whose named backend cannot give `loss.signal`; no server has to be asked."""
    signal = recipe.loss.signal
    if recipe.loss.distill_coef == 0 or signal in _CLOSED_SIGNALS:
        return []
    return [
        f"teachers.{name}: cannot give {signal}; its {teacher.backend} backend offers {', '.join(_CLOSED_SIGNALS)}"
        for name, teacher in recipe.teachers.items()
        if teacher.backend in ("vllm", "sglang", "openai")
    ]


def _lengths(rows: Sequence[Row], measure: Measure | None) -> list[int]:
    """Prompt lengths; without a tokenizer every prompt counts as one token, the minimum."""
    if measure is None:
        return [1] * len(rows)
    lengths = []
    for row in rows:
        try:
            found = measure(row)
            lengths.append(found.length if found else 1)
        except DataError:  # reported by `check_rows`
            lengths.append(1)
    return lengths


def scores_row(data: DataConfig, teachers: Mapping[str, TeacherConfig], name: str, row: Row) -> bool:
    weights = row.get(data.mixture_key)
    if isinstance(weights, Mapping):
        return bool(weights.get(name))
    if len(teachers) == 1:
        return True
    value = teacher_key_of(row.get(data.teacher_key))
    keys = {teacher.key for teacher in teachers.values()}
    return value == teachers[name].key or (name == data.default_teacher and value not in keys)


def own_start_notes(recipe: Recipe) -> list[str]:
    """A note on each teacher that is the student as it started and reads the same prompt. Refused only for a live
    one: rewards or given answers move the student away, and then such a teacher holds it near its start."""
    if recipe.loss.task_coef or recipe.loss.sft_coef or recipe.rollout.off_policy:
        return []
    return [
        f"teachers.{name} is the student as it starts and reads the student's prompt: the loss begins at 0 and nothing moves the "
        "student; give it a `prompt` of its own, or set loss.task_coef"
        for name, teacher in recipe.teachers.items()
        if teacher.version == "start" and not teacher.reads_own_prompt
    ]
