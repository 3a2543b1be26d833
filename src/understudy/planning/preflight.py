"""All checks of a recipe that need neither a started process nor torch.

`preflight(recipe)` reads model folders, data files and ports and returns each problem as one line.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any

from understudy.cluster.devices import visible_gpus
from understudy.config import Recipe, TeacherConfig
from understudy.config.rollout import RolloutConfig
from understudy.errors import ConfigError, UnderstudyError
from understudy.observability.loggers.logged_metrics import missing_loggers
from understudy.observability.rundir import probe_run_dir
from understudy.observability.slow_work import SlowWork
from understudy.planning.data_checks import (
    Lacked,
    check_rows,
    clipped,
    measured_once,
    prompt_length,
    tokens_fit,
)
from understudy.planning.image_checks import look_at_pictures, picture_problems, with_picture_tokens
from understudy.planning.models.aligned import (
    aligned_sides,
    alignment_notes,
    rows_can_be_aligned,
    unread_tokenizers,
)
from understudy.planning.models.config_checks import models_load
from understudy.planning.models.folder import HubNotReached, ModelFolder
from understudy.planning.models.opened import open_models
from understudy.planning.models.pairs import Side, pair_notes, pair_problems, tokens_lacked
from understudy.planning.objective import describe
from understudy.planning.overlong import prompt_limits
from understudy.planning.reward_check import check_reward
from understudy.planning.seating import seat
from understudy.planning.teacher_checks import (
    Measure,
    Measured,
    Row,
    answers_given,
    bases_fit,
    contexts_fit,
    contexts_of,
    mixtures_fit,
    offloads_fit,
    own_prompts,
    own_start_notes,
    prompts_render,
    sessions_can_be_shown,
    signals_fit,
    silent_servers,
)
from understudy.rollout.agents.registry import LoopChoice
from understudy.rollout.dataset import Dataset, load_dataset
from understudy.rollout.loading import look_in
from understudy.rollout.teacher_prompts import TeacherPrompt
from understudy.serving.endpoint import Endpoint

PYTHON_VARIABLE = "UNDERSTUDY_VLLM_PYTHON"


def endpoints_of(rollout: RolloutConfig, environment: Mapping[str, str] = os.environ) -> list[Endpoint]:
    token = environment.get(rollout.token_env) if rollout.token_env else None
    if rollout.token_env and not token:
        raise ConfigError(
            f"rollout.token_env = {rollout.token_env!r}: that environment variable is empty; export the token"
        )
    return [Endpoint(url.rstrip("/"), token=token) for url in rollout.urls]


def vllm_python(
    section: RolloutConfig | TeacherConfig,
    environment: Mapping[str, str] = os.environ,
    place: str = "rollout",
) -> str:
    """The interpreter that starts vLLM, which has its own environment, so that its pins do not conflict with
    ours. `place`: the section's name in the recipe."""
    python = section.vllm_python or environment.get(PYTHON_VARIABLE)
    if not python:
        key = "engine" if isinstance(section, RolloutConfig) else "backend"
        raise ConfigError(
            f"{place}.{key} = 'vllm' starts vLLM in an environment of its own: set {place}.vllm_python (or the variable "
            f"{PYTHON_VARIABLE}) to that environment's interpreter, or give `urls` of running servers"
        )
    if not os.access(python, os.X_OK):
        raise ConfigError(f"{place}.vllm_python = {python!r} is not an interpreter that can be run")
    return python


_MATH = "understudy.rollout.rewards.math_reward:math_verify"


def missing_extras(recipe: Recipe) -> list[str]:
    """Extras that the recipe needs and this machine lacks; found without importing them."""
    asks = [
        (recipe.cluster.backend == "ray", "cluster.backend = 'ray'", "ray", "ray"),
        (
            recipe.dataplane.backend == "transfer_queue",
            "dataplane.backend = 'transfer_queue'",
            "transfer_queue",
            "ray",
        ),
        (recipe.student.lora is not None, "[student.lora]", "peft", "lora"),
        (recipe.data.reward == _MATH, f"data.reward = {_MATH!r}", "math_verify", "math"),
    ]
    return [
        f'{key} needs the {extra} extra: pip install "understudy[{extra}]"'
        for asked, key, module, extra in asks
        if asked and find_spec(module) is None
    ]


def require_extras(recipe: Recipe) -> None:
    problems = missing_extras(recipe)
    if problems:
        raise ConfigError(problems)


_SHOWN = 3


@dataclass
class Findings:
    """Results of the checks besides problems."""

    notes: list[str] = field(default_factory=list)
    """Lines for the user."""
    unreached: list[str] = field(default_factory=list)
    """Those of them that say what could not be asked: the hub, or a server that the recipe names."""
    train_rows: int | None = None
    """Rows of `data.train` that the run would use; None if they cannot be read."""


def preflight(
    recipe: Recipe,
    *,
    progress: bool = False,
    findings: Findings | None = None,
    starting: bool = True,
    new_run: bool = True,
) -> list[str]:
    """Every problem, one line each; with `progress`, long checks report their progress.

    `starting`: the run starts on this machine next, so a hub or a teacher's server that cannot be asked is a
    problem. If the recipe is only checked, or its models are loaded on other machines, it is a note. `new_run`:
    run.dir must be free."""
    look_in(recipe.run.python_path)
    findings = findings or Findings()
    slow = SlowWork(enabled=progress)
    problems: list[str] = []
    here = starting and recipe.cluster.backend == "local"

    def attempt(action: Callable[[], Any]) -> Any:
        try:
            return action()
        except HubNotReached as error:
            (problems if here else findings.unreached).append(str(error))
        except UnderstudyError as error:
            problems.append(str(error))
        return None

    attempt(lambda: describe(recipe.loss))
    models = open_models(recipe, attempt)
    student = models.get("student")
    attempt(lambda: seat(recipe, None))
    problems += signals_fit(recipe) + bases_fit(recipe)
    lacked, aligned = attempt(lambda: _pairs_fit(recipe, models, problems, findings)) or ({}, {})
    folders: dict[str, ModelFolder] = {}
    for name, teacher in recipe.teachers.items():
        problems += _ports(name, teacher.ports)
        if teacher.starts_vllm:
            attempt(partial(vllm_python, teacher, place=f"teachers.{name}"))
        folder = models.get(f"teachers.{name}")
        if folder and teacher.placement != "external":
            folders[name] = folder
            problems += _fits_vocabulary(recipe, folder, f"teachers.{name}")
    if student:
        problems += _fits_vocabulary(recipe, student, "student")
    problems += models_load(recipe, student, folders) + offloads_fit(recipe.teachers, folders)
    loops = attempt(lambda: LoopChoice(recipe.rollout.agent, recipe.rollout.agent_options))
    for name in recipe.rollout.agent_options if loops else ():
        attempt(lambda name=name: loops.of_name(name))  # type: ignore[misc]
    schemas = loops.schemas if loops else None
    searched = {number for tokens in lacked.values() for number in tokens}
    whole = (
        with_picture_tokens(prompt_length(student, recipe, schemas, searched), recipe, student)
        if student
        else None
    )
    measure = measured_once(whole) if whole else None
    of_teacher = {
        name: prompt_length(folder, recipe, schemas, owner=f"teachers.{name}")
        for name, folder in aligned.items()
    }
    prompts = attempt(lambda: own_prompts(recipe.teachers)) or {}
    problems += sessions_can_be_shown(recipe, prompts)
    findings.notes += own_start_notes(recipe)
    if student is None and not problems:
        findings.notes.append(
            f"prompts were not measured: config.json and tokenizer.json of student.model = {recipe.student.model!r} cannot be read here"
        )
    room = recipe.data, recipe.rollout, student.context if student else None
    limits = {
        "train": prompt_limits(*room, recipe.teachers, contexts_of(recipe.teachers, folders)),
        "eval": prompt_limits(*room),
    }
    read: dict[str, Dataset] = {}
    for key in ("train", "eval"):
        sources, name = getattr(recipe.data, key), f"data.{key}"
        if not sources:
            continue
        with slow.work(f"reading {name}"):
            dataset = attempt(lambda sources=sources, name=name: load_dataset(sources, name))  # type: ignore[misc]
        if dataset is None:
            continue
        shown = dataset.with_pictures()
        unread = picture_problems(recipe, dataset, name, student, folders) if shown else []
        problems += unread
        with slow.work(f"checking the rows of {name}", len(dataset)) as advance:
            # The chat template of a student that reads no pictures cannot render them: the line above says why.
            checked = check_rows(recipe, dataset, name, limits[key], None if unread else measure, advance)
        problems += checked.problems
        findings.notes += checked.notes
        if shown:
            with slow.work(f"looking at the pictures of {name}", len(shown)) as advance:
                found = attempt(
                    lambda dataset=dataset, name=name, advance=advance: look_at_pictures(  # type: ignore[misc]
                        recipe, dataset, name, advance
                    )
                )
            if found is not None:
                problems += found[0]
                findings.notes += found[1]
        read[name] = checked.dataset
        if key == "train":
            findings.train_rows = len(checked.dataset)
            problems += mixtures_fit(recipe, checked.dataset)
            problems += answers_given(recipe, checked.dataset)
            problems += rows_can_be_aligned(recipe.data, aligned, checked.dataset)
            own = {name: measured_once(one) for name, one in of_teacher.items()} | {
                name: measured_once(_own_length(one, of_teacher.get(name, whole)))
                for name, one in prompts.items()
            }
            problems += prompts_render(recipe, checked.dataset, own)
            sent = clipped(measure, limits[key], recipe.data.overlong)
            problems += contexts_fit(recipe, checked.dataset, folders, sent, own)
            for teacher, one in ((None, sent), *own.items()) if lacked and sent else ():
                if teacher in aligned:
                    continue
                written = tokens_fit(recipe, checked.dataset, one, lacked, teacher)
                problems += written.problems
                findings.notes += written.notes
    if recipe.data.reward:
        with slow.work("asking the reward about the first rows"):
            reward = check_reward(recipe, read)
        problems += reward.problems
        findings.notes += reward.notes
    attempt(lambda: _rollouts_can_be_made(recipe, student))
    none_answers, some_answer = silent_servers(recipe)
    (problems if here else findings.unreached).extend(none_answers)
    findings.notes += [*some_answer, *findings.unreached]
    attempt(lambda: probe_run_dir(recipe.run.dir, new=new_run))
    problems += missing_loggers(recipe.run.loggers)
    problems += missing_extras(recipe)
    return list(dict.fromkeys(problems))


def _own_length(prompt: TeacherPrompt, length: Measure | None) -> Measure:
    """The tokens of a teacher's own prompt; None if the student's tokenizer is not known."""

    def measure(row: Row) -> Measured | None:
        seen = prompt.of_row(row)
        return None if length is None else length(seen)

    return measure


def _rollouts_can_be_made(recipe: Recipe, student: ModelFolder | None) -> None:
    """Raises `ConfigError` if the engine lacks something it needs to start."""
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


def _writes_on_a_cpu(recipe: Recipe) -> bool:
    """As far as that is known before a cluster is started."""
    remote = recipe.rollout.devices or "rollout" in recipe.cluster.roles
    device = recipe.student.device
    return not remote and (device == "cpu" or (device == "auto" and not visible_gpus()))


def _pairs_fit(
    recipe: Recipe, models: Mapping[str, ModelFolder], problems: list[str], findings: Findings
) -> tuple[Lacked, dict[str, ModelFolder]]:
    """Checks that every other model maps token ids as the student does; other differences become notes. Returns
    the tokens that prompts must not hold, and the teachers whose tokens are aligned with the student's."""
    problems += unread_tokenizers(recipe.teachers, models)
    if "student" not in models:
        return {}, {}
    student = Side.of(models["student"], "student")
    others = [Side.of(folder, place) for place, folder in models.items() if place != "student"]
    aligned = {
        name: models[side.place] for name, side in aligned_sides(recipe.teachers, student, others).items()
    }
    others = [side for side in others if side.place.removeprefix("teachers.") not in aligned]
    for name, folder in aligned.items():
        wrong, notes = alignment_notes(models["student"], folder, name, recipe.loss)
        problems += wrong
        findings.notes += notes
    for other in others:
        found = pair_problems(student, other)
        problems += found
        findings.notes += [] if found else pair_notes(student, other)
    return tokens_lacked(student, others), aligned


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
