"""Everything about a recipe that can be found wrong before a process is started or torch is imported.

`preflight(recipe)` reads model folders, data files and ports and returns every problem as one line.
"""

from __future__ import annotations

import importlib
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
from tokenizers import Tokenizer

from understudy.cluster.devices import visible_gpus
from understudy.config import Recipe, TeacherConfig
from understudy.config.base import nearest
from understudy.errors import ConfigError, DataError, UnderstudyError
from understudy.losses.describe import ObjectiveDescription, describe_objective
from understudy.observability.loggers import missing_loggers
from understudy.observability.patience import Patience
from understudy.rollout.dataset import Dataset, load_dataset
from understudy.rollout.loops import build_loop
from understudy.trainers.extras import missing_extras
from understudy.trainers.model_folder import ModelFolder, is_hub_id
from understudy.trainers.seating import seat
from understudy.trainers.student_servers import endpoints_of, vllm_python
from understudy.trainers.teacher_checks import Measure, contexts_fit, mixtures_fit, signals_fit

_SHOWN = 3


def preflight(recipe: Recipe, *, progress: bool = False) -> list[str]:
    """Every problem, one line each; with `progress`, a check that takes long says how far it has come."""
    patience = Patience(enabled=progress)
    problems: list[str] = []

    def attempt(action: Callable[[], Any]) -> Any:
        try:
            return action()
        except UnderstudyError as error:
            problems.append(str(error))
            return None

    attempt(lambda: describe(recipe))
    student = _open_model(recipe.student.model, "student.model", attempt)
    attempt(lambda: seat(recipe, None))
    problems += signals_fit(recipe)
    for role, model in (("critic", recipe.critic), ("reference", recipe.reference)):
        beside = _open_model(model.model or "", f"{role}.model", attempt) if model else None
        if student and beside:
            problems += teacher_fits(student, beside, role, place=role)
    folders: dict[str, ModelFolder] = {}
    for name, teacher in recipe.teachers.items():
        problems += _ports(name, teacher.ports)
        folder = _open_teacher(teacher, name, attempt)
        if student and folder:
            problems += teacher_fits(student, folder, name)
        if folder and teacher.placement != "external":
            folders[name] = folder
            problems += _fits_vocabulary(recipe, folder, f"teachers.{name}")
    if student:
        problems += _fits_vocabulary(recipe, student, "student")
    measure = _measured_once(_prompt_length(student)) if student else None
    for key in ("train", "eval"):
        path = getattr(recipe.data, key)
        if path:
            with patience.work(f"reading data.{key}"):
                dataset = attempt(lambda path=path: load_dataset(path))  # type: ignore[misc]
            if dataset:
                with patience.work(f"checking the rows of data.{key}", len(dataset.rows)) as advance:
                    problems += _rows_fit(recipe, dataset, f"data.{key}", student, measure, advance)
            if dataset and key == "train":
                problems += mixtures_fit(recipe, dataset.rows)
                problems += contexts_fit(recipe, dataset.rows, folders, measure)
    if recipe.data.reward:
        attempt(lambda: _importable(str(recipe.data.reward)))
    attempt(lambda: _rollouts_can_be_made(recipe, student))
    problems += missing_loggers(recipe.run.loggers)
    problems += missing_extras(recipe)
    return list(dict.fromkeys(problems))


def _rollouts_can_be_made(recipe: Recipe, student: ModelFolder | None) -> None:
    """The engine has what it needs to start, and the agent loop can be made with its options."""
    rollout = recipe.rollout
    if rollout.starts_servers:
        vllm_python(rollout)
    endpoints_of(rollout)
    if student and student.context and (rollout.context_length or 0) > student.context:
        raise ConfigError(
            f"rollout.context_length = {rollout.context_length}; the student holds {student.context} tokens"
        )
    if rollout.kv_cache == "fp8" and _writes_on_a_cpu(recipe):
        raise ConfigError(
            f"rollout.kv_cache = 'fp8' needs a GPU to write on; student.device = {recipe.student.device!r} is a CPU here. Leave it out"
        )
    build_loop(rollout.agent, rollout.agent_options.get(rollout.agent))


def _writes_on_a_cpu(recipe: Recipe) -> bool:
    """As far as that is known before a cluster is asked."""
    elsewhere = recipe.rollout.devices or "rollout" in recipe.cluster.roles
    device = recipe.student.device
    return not elsewhere and (device == "cpu" or (device == "auto" and not visible_gpus()))


def describe(recipe: Recipe) -> ObjectiveDescription:
    """Name and formula of the objective this recipe trains, or a refusal that explains itself."""
    loss = recipe.loss
    return describe_objective(
        loss.kind,
        loss.signal,
        loss.tail,
        topk=loss.topk,
        beta=loss.beta,
        alpha=loss.alpha,
        mixture_weight=loss.mixture_weight,
        policy_gradient=loss.policy_gradient,
        distill_coef=loss.distill_coef,
        task_coef=loss.task_coef,
        clip_low=loss.clip_low,
        clip_high=loss.clip_high,
        dual_clip=loss.dual_clip,
        tis_cap=loss.tis_cap,
        discount=loss.discount,
        per_token_clamp=loss.per_token_clamp,
        loss_max_clamp=loss.loss_max_clamp,
        log_prob_min_clamp=loss.log_prob_min_clamp,
        clamp_at_zero=loss.clamp_at_zero,
        student_temperature=loss.student_temperature,
        teacher_temperature=loss.teacher_temperature,
        kl_coef=loss.kl_coef if loss.kl_in == "loss" else 0.0,
        kl_kind=loss.kl_kind,
    )


def teacher_fits(
    student: ModelFolder, teacher: ModelFolder, name: str, place: str | None = None
) -> list[str]:
    """The token→id maps must agree, special ids too; padded vocabulary rows may differ in number. `place` is what the
    recipe calls it, where that is not a teacher."""
    place, other = place or f"teachers.{name}", place or "teacher"
    ours, theirs = student.token_ids, teacher.token_ids
    differing = sorted(
        (token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)),
        key=lambda token: min(ours.get(token, 1 << 60), theirs.get(token, 1 << 60)),
    )
    if differing:
        shown = ", ".join(
            f"{token!r}: student {ours.get(token)} {other} {theirs.get(token)}"
            for token in differing[:_SHOWN]
        )
        return [
            f"{place}: its tokenizer differs from the student's in {len(differing)} tokens ({shown} …); "
            "both must share one token→id map"
        ]
    return [
        f"{place}: {role} is {teacher.special_ids[role]}, the student's is {value}; special ids must be equal"
        for role, value in student.special_ids.items()
        if value != teacher.special_ids[role]
    ]


def _open_model(model: str, role: str, attempt: Callable[[Callable[[], Any]], Any]) -> ModelFolder | None:
    if not model or is_hub_id(model):
        return None  # fetched and checked at start
    folder = attempt(lambda: ModelFolder.open(model, role))
    return folder if isinstance(folder, ModelFolder) else None


def _open_teacher(
    teacher: TeacherConfig, name: str, attempt: Callable[[Callable[[], Any]], Any]
) -> ModelFolder | None:
    """An external teacher's folder need not be here; where its tokenizer is, it can be compared."""
    if teacher.placement != "external":
        return _open_model(teacher.model, f"teachers.{name}.model", attempt)
    path = Path(teacher.model)
    return (
        ModelFolder(path)
        if (path / "tokenizer.json").is_file() and (path / "config.json").is_file()
        else None
    )


def _fits_vocabulary(recipe: Recipe, folder: ModelFolder, role: str) -> list[str]:
    if (
        recipe.loss.distill_coef > 0
        and recipe.loss.signal in ("topk", "at_ids")
        and recipe.loss.topk > folder.vocab_size
    ):
        return [
            f"loss.topk = {recipe.loss.topk} is larger than the vocabulary of {role} ({folder.vocab_size}); lower loss.topk"
        ]
    return []


def _ports(teacher: str, ports: list[int]) -> list[str]:
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


def _rows_fit(
    recipe: Recipe,
    dataset: Dataset,
    role: str,
    student: ModelFolder | None,
    measure: Measure | None,
    advance: Callable[[int], None],
) -> list[str]:
    problems = _routes(recipe, dataset, role)
    if student is None or measure is None:
        return problems
    room = recipe.rollout.context_length or student.context
    if room is None:
        return problems
    too_long = 0
    for number, row in enumerate(dataset.rows):
        advance(1)
        try:
            length = measure(row)
        except jinja2.TemplateError as error:
            problems.append(
                f"{role}: row {number} cannot be rendered by the student's chat template: {error}"
            )
            break
        if length is not None and length + recipe.rollout.max_new_tokens > room:
            too_long += 1
            if too_long == 1:
                problems.append(
                    f"{role}: the prompt of row {number} has {length} tokens; with rollout.max_new_tokens = "
                    f"{recipe.rollout.max_new_tokens} it exceeds the student's context of {room}; shorten or drop it"
                )
    if too_long > 1:
        problems[-1] += f" ({too_long} rows in all)"
    return problems


def _routes(recipe: Recipe, dataset: Dataset, role: str) -> list[str]:
    """Every row must find its teacher."""
    keys = {teacher.key for teacher in recipe.teachers.values()} - {None}
    if len(recipe.teachers) < 2 or recipe.data.default_teacher:
        return []
    column, problems = recipe.data.teacher_key, []
    mixture = recipe.data.mixture_key
    values = {row.get(column) for row in dataset.rows if row.get(mixture) is None}
    for value in sorted((value for value in values if value not in keys), key=str):
        guess = nearest(str(value), [str(key) for key in keys])
        hint = f"; did you mean {guess!r}?" if guess else ""
        problems.append(
            f"{role}: rows with {column} = {value!r} have no teacher; teachers take {sorted(map(str, keys))}{hint} "
            "(set data.default_teacher to send the rest to one)"
        )
    return problems[:_SHOWN]


def _measured_once(measure: Measure) -> Measure:
    """Rendering and tokenizing is most of a check's time, and two checks want it."""
    known: dict[int, tuple[Mapping[str, Any], int | None]] = {}

    def remembered(row: Mapping[str, Any]) -> int | None:
        if id(row) not in known:
            known[id(row)] = (row, measure(row))  # the row is kept, so that its id stays its own
        return known[id(row)][1]

    return remembered


def _prompt_length(student: ModelFolder) -> Measure:
    """Tokens of a row's rendered prompt, without importing transformers (which imports torch)."""
    tokenizer = Tokenizer.from_file(str(student.path / "tokenizer.json"))
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: form
    template = environment.from_string(student.chat_template) if student.chat_template else None
    names = {value: key for key, value in student.token_ids.items()}
    special = {
        role: names.get(student.special_ids[role], "") for role in ("bos_token", "eos_token", "pad_token")
    }

    def measure(row: Mapping[str, Any]) -> int | None:
        if row.get("messages") is None:
            return len(tokenizer.encode(str(row["prompt"])).ids)
        if template is None:
            raise jinja2.TemplateError(
                "the tokenizer has no chat template; give `prompt` instead of `messages`, or add one"
            )
        text = template.render(
            messages=row["messages"], tools=row.get("tools"), add_generation_prompt=True, **special
        )
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    return measure


def _importable(reference: str) -> None:
    module, colon, name = reference.partition(":")
    if not colon:
        raise DataError(
            f"data.reward = {reference!r}: expected 'module:function', for example 'understudy.rollout.reward:gsm8k'"
        )
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise DataError(f"data.reward = {reference!r}: {error}; is the module on the Python path?") from None
    if not callable(found):
        guess = nearest(name, dir(importlib.import_module(module)))
        raise DataError(
            f"data.reward = {reference!r}: {module} has no function {name}"
            + (f"; did you mean {guess!r}?" if guess else "")
        )
