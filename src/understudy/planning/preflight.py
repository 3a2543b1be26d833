"""All checks of a recipe that need neither a started process nor torch.

`preflight(recipe)` reads model folders, data files and ports and returns each problem as one line.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import ParamSpec, TypeVar

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
    length_of_own,
    measured_once,
    prompt_length,
    tokens_fit,
)
from understudy.planning.image_checks import (
    look_at_pictures,
    picture_problems,
    replicas_read_pictures,
    with_picture_tokens,
)
from understudy.planning.installed import FRAMEWORKS, too_old
from understudy.planning.models.adapter_targets import targets_fit
from understudy.planning.models.aligned import (
    aligned_sides,
    alignment_notes,
    rows_can_be_aligned,
    unread_tokenizers,
)
from understudy.planning.models.config_checks import models_load, topk_fits
from understudy.planning.models.folder import HubNotReached, ModelFolder
from understudy.planning.models.opened import open_models
from understudy.planning.models.pairs import Side, pair_notes, pair_problems, tokens_lacked
from understudy.planning.objective import describe, sampling_notes
from understudy.planning.overlong import PromptLimits, prompt_limits
from understudy.planning.reward_check import check_reward
from understudy.planning.seating import seat
from understudy.planning.teacher_checks import (
    Measure,
    answers_given,
    bases_fit,
    contexts_fit,
    contexts_of,
    mixtures_fit,
    offloads_fit,
    own_prompts,
    own_start_notes,
    ports_free,
    prompts_render,
    sessions_are_rewarded,
    sessions_can_be_shown,
    signals_fit,
    silent_servers,
)
from understudy.rollout.agents.registry import LoopChoice, Schemas
from understudy.rollout.dataset import Dataset, load_dataset
from understudy.rollout.loading import set_python_path
from understudy.serving.endpoint import Endpoint

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
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
    set_python_path(recipe.run.python_path)
    here = starting and recipe.cluster.backend == "local"
    checks = _Checks(recipe, findings or Findings(), SlowWork(enabled=progress), here)
    checks.problems += too_old(FRAMEWORKS)
    checks.attempt(describe, recipe.loss)
    checks.findings.notes += sampling_notes(recipe.loss, recipe.rollout)
    models = checks.models()
    schemas = checks.agent_loops()
    prompts = checks.prompts(models, schemas)
    train = checks.data_file("data.train", recipe.data.train, models, prompts)
    if train is not None:
        checks.training_rows(train, models, prompts)
    held_out = checks.data_file("data.eval", recipe.data.eval, models, prompts)
    checks.reward({"data.train": train, "data.eval": held_out})
    checks.attempt(_rollouts_can_be_made, recipe, models.student)
    checks.servers()
    checks.environment(new_run)
    return list(dict.fromkeys(checks.problems))


@dataclass(frozen=True)
class _Models:
    """The models whose files can be read here."""

    student: ModelFolder | None
    teachers: dict[str, ModelFolder]
    """Those that the run starts, by name."""
    aligned: dict[str, ModelFolder]
    """Teachers whose tokens are aligned with the student's, by name."""
    lacked: Lacked
    """The tokens that prompts must not hold."""


@dataclass(frozen=True)
class _Prompts:
    """How the prompts of rows are measured, and how long they may be."""

    student: Measure | None
    """None if the student's tokenizer is not known."""
    own: dict[str, Measure]
    """Of teachers that read a prompt or a tokenizer of their own, by name."""
    limits: dict[str, PromptLimits]
    """By data file."""


class _Checks:
    """The checks of one recipe: each adds what it finds to `problems` and `findings`."""

    def __init__(self, recipe: Recipe, findings: Findings, slow: SlowWork, here: bool) -> None:
        self.recipe, self.findings, self.slow = recipe, findings, slow
        self.problems: list[str] = []
        self.unreached = self.problems if here else findings.unreached

    def attempt(
        self, action: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result | None:
        """What `action` returns; None if it raised, which becomes a finding."""
        try:
            return action(*args, **kwargs)
        except HubNotReached as error:
            self.unreached.append(str(error))
        except UnderstudyError as error:
            self.problems.append(str(error))
        return None

    def models(self) -> _Models:
        """Opens the models, and checks their seats, signals, vocabularies and files."""
        recipe = self.recipe
        found = open_models(recipe, self.attempt)
        student = found.get("student")
        self.attempt(seat, recipe, None)
        self.problems += signals_fit(recipe) + bases_fit(recipe)
        lacked, aligned = self.attempt(self._pairs, found) or ({}, {})
        teachers = self._teachers(found)
        if student:
            self.problems += topk_fits(recipe, student, "student")
            self._add(*targets_fit(recipe, student))
        self.problems += models_load(recipe, student, teachers) + offloads_fit(recipe.teachers, teachers)
        self.problems += replicas_read_pictures(recipe.teachers, teachers)
        return _Models(student, teachers, aligned, lacked)

    def _pairs(self, models: Mapping[str, ModelFolder]) -> tuple[Lacked, dict[str, ModelFolder]]:
        """Checks that every other model maps token ids as the student does; other differences become notes.
        Returns the tokens that prompts must not hold, and the teachers whose tokens are aligned with the
        student's."""
        teachers = self.recipe.teachers
        self.problems += unread_tokenizers(teachers, models)
        if "student" not in models:
            return {}, {}
        student = Side.of(models["student"], "student")
        others = [Side.of(folder, place) for place, folder in models.items() if place != "student"]
        aligned = {
            name: models[side.place] for name, side in aligned_sides(teachers, student, others).items()
        }
        others = [side for side in others if side.place.removeprefix("teachers.") not in aligned]
        for name, folder in aligned.items():
            wrong, notes = alignment_notes(models["student"], folder, name, self.recipe.loss)
            self.problems += wrong
            self.findings.notes += notes
        for other in others:
            found = pair_problems(student, other)
            self.problems += found
            self.findings.notes += [] if found else pair_notes(student, other)
        return tokens_lacked(student, others), aligned

    def _teachers(self, models: Mapping[str, ModelFolder]) -> dict[str, ModelFolder]:
        """Checks what teachers need to start. Returns the models of those that the run starts."""
        folders: dict[str, ModelFolder] = {}
        for name, teacher in self.recipe.teachers.items():
            self.problems += ports_free(name, teacher.ports)
            if teacher.starts_vllm:
                self.attempt(vllm_python, teacher, place=f"teachers.{name}")
            folder = models.get(f"teachers.{name}")
            if folder and teacher.placement != "external":
                folders[name] = folder
                self.problems += topk_fits(self.recipe, folder, f"teachers.{name}")
        return folders

    def agent_loops(self) -> Schemas | None:
        """Makes every loop that the recipe names. Returns which tools a row's loop shows."""
        rollout = self.recipe.rollout
        loops = self.attempt(LoopChoice, rollout.agent, rollout.agent_options)
        if loops is None:
            return None
        for name in rollout.agent_options:
            self.attempt(loops.of_name, name)
        return loops.schemas

    def prompts(self, models: _Models, schemas: Schemas | None) -> _Prompts:
        """Checks the prompts that teachers have of their own. Returns how the prompts of rows are measured."""
        recipe, student = self.recipe, models.student
        whole = None
        if student:
            searched = {number for tokens in models.lacked.values() for number in tokens}
            plain = self.attempt(prompt_length, student, recipe, schemas, searched)
            whole = with_picture_tokens(plain, recipe, student) if plain else None
        lengths: dict[str, Measure] = {}
        for name, folder in models.aligned.items():
            key = f"teachers.{name}"
            if read := self.attempt(prompt_length, folder, recipe, schemas, owner=key, own_template=True):
                lengths[name] = read
        own = self.attempt(own_prompts, recipe.teachers) or {}
        self.problems += sessions_can_be_shown(recipe, own)
        self.findings.notes += own_start_notes(recipe)
        if student is None and not self.problems:
            self.findings.notes.append(
                f"prompts were not measured: config.json and tokenizer.json of student.model = {recipe.student.model!r} cannot be read here"
            )
        lengths |= {name: length_of_own(one, lengths.get(name, whole)) for name, one in own.items()}
        room = recipe.data, recipe.rollout, student.context if student else None
        of_same_ids = {name: one for name, one in models.teachers.items() if name not in models.aligned}
        contexts = contexts_of(recipe.teachers, of_same_ids)
        return _Prompts(
            measured_once(whole) if whole else None,
            {name: measured_once(length) for name, length in lengths.items()},
            {
                "data.train": prompt_limits(*room, recipe.teachers, contexts),
                "data.eval": prompt_limits(*room),
            },
        )

    def data_file(
        self, name: str, sources: list[str] | None, models: _Models, prompts: _Prompts
    ) -> Dataset | None:
        """The rows that the run would use; None if there are none or they cannot be read."""
        if not sources:
            return None
        recipe = self.recipe
        with self.slow.work(f"reading {name}"):
            dataset = self.attempt(load_dataset, sources, name)
        if dataset is None:
            return None
        shown = dataset.with_pictures()
        unread = picture_problems(recipe, dataset, name, models.student, models.teachers) if shown else []
        self.problems += unread
        # The chat template of a student that reads no pictures cannot render them: `unread` says why.
        measure = None if unread else prompts.student
        with self.slow.work(f"checking the rows of {name}", len(dataset)) as advance:
            checked = check_rows(recipe, dataset, name, prompts.limits[name], measure, advance)
        self._add(checked.problems, checked.notes)
        if shown:
            with self.slow.work(f"looking at the pictures of {name}", len(shown)) as advance:
                found = self.attempt(look_at_pictures, recipe, dataset, name, advance)
            self._add(*(found or ([], [])))
        return checked.dataset

    def training_rows(self, dataset: Dataset, models: _Models, prompts: _Prompts) -> None:
        """Checks the rows against the teachers that score them."""
        recipe = self.recipe
        self.findings.train_rows = len(dataset)
        self.problems += mixtures_fit(recipe, dataset)
        self.problems += answers_given(recipe, dataset)
        self.problems += rows_can_be_aligned(recipe.data, models.aligned, dataset)
        self.problems += prompts_render(recipe, dataset, prompts.own)
        self.problems += self.attempt(sessions_are_rewarded, recipe, dataset) or []
        sent = clipped(prompts.student, prompts.limits["data.train"], recipe.data.overlong)
        self.problems += contexts_fit(recipe, dataset, models.teachers, sent, prompts.own)
        if not models.lacked or sent is None:
            return
        read = {name: one for name, one in prompts.own.items() if name not in models.aligned}
        for teacher, measure in ((None, sent), *read.items()):
            written = tokens_fit(recipe, dataset, measure, models.lacked, teacher)
            self._add(written.problems, written.notes)

    def reward(self, data: Mapping[str, Dataset | None]) -> None:
        if not self.recipe.data.reward:
            return
        read = {name: dataset for name, dataset in data.items() if dataset is not None}
        with self.slow.work("asking the reward about the first rows"):
            reward = check_reward(self.recipe, read)
        self._add(reward.problems, reward.notes)

    def servers(self) -> None:
        found = silent_servers(self.recipe)
        self.unreached += found.wrong
        self.findings.unreached += found.silent
        self.findings.notes += self.findings.unreached

    def environment(self, new_run: bool) -> None:
        run = self.recipe.run
        self.attempt(probe_run_dir, run.dir, new=new_run)
        self.problems += missing_loggers(run.loggers)
        self.problems += missing_extras(self.recipe)

    def _add(self, problems: list[str], notes: list[str]) -> None:
        self.problems += problems
        self.findings.notes += notes


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
