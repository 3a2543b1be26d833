"""Builds a running `System` from a recipe. Other modules get a section of it or a record of `Resolved`.

    _prepare          torch, cluster, seats
    _inputs           student, tokenizers, prompts
    _engine_and_teachers, _policy, _critic, _reference       models; the student's weights are published as version 0
    _plane, _batches, _session_parts, _run_state             rows, agent loops and rewards, files of the run
    _producer, _learner                                      the records that the schedules use

`build` calls them in this order, and its exit stack stops the parts in the reverse order.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from understudy.assembly.backends import open_plane
from understudy.assembly.cpu_threads import onednn_as_resolved, raised_gc_threshold, set_up_torch
from understudy.assembly.critic import StartingCritic, critic_of, reference_of
from understudy.assembly.engines import longest_request, open_engine, publisher_of, renderer_of, sampling_of
from understudy.assembly.learner import batches_of, load_source, objective_of, policy_settings
from understudy.assembly.ranks import start_ranks
from understudy.assembly.sessions import RowWorkerSettings, open_loops, rollouts_of
from understudy.assembly.teachers.admin import open_for_requests
from understudy.assembly.teachers.clients import teacher_tokens
from understudy.assembly.teachers.following import SelfTeachers, self_teachers_of
from understudy.assembly.teachers.prompts import (
    aligners_of,
    other_tokenizers,
    teacher_prompts_of,
    writable_ids,
)
from understudy.assembly.teachers.queues import router_of, teacher_queues
from understudy.assembly.teachers.running import Teachers
from understudy.assembly.teachers.start import start_teachers
from understudy.assembly.teachers.student_facts import student_facts
from understudy.assembly.this_machine import gpu_names
from understudy.assembly.usable_ids import Vocabularies, find_usable_ids, keep_usable_ids
from understudy.cluster.local import LocalProcesses
from understudy.config import Recipe
from understudy.config.base import flatten
from understudy.dataplane.base import DataPlane
from understudy.engines.base import Engine, Sampling
from understudy.media.store import MediaStore
from understudy.observability.live import LiveView
from understudy.observability.loggers.logged_metrics import LoggedMetrics
from understudy.observability.metrics import read_metrics
from understudy.observability.redact import redact
from understudy.observability.rundir import RunDir
from understudy.observability.spans import Spans
from understudy.planning.resolved import Resolved, resolve
from understudy.planning.seating import Seating, rollout_devices
from understudy.planning.this_machine import seat_here
from understudy.policy.checkpoints.background import BackgroundSaver
from understudy.policy.checkpoints.checkpoint import CheckpointStore
from understudy.policy.policy import Policy
from understudy.policy.ranks.follow import LeadingPolicy
from understudy.policy.reference import ReferenceModel
from understudy.rollout.agents.registry import Loops
from understudy.rollout.cursor import PromptCursor
from understudy.rollout.loading import set_python_path
from understudy.rollout.render import Renderer
from understudy.rollout.rewards.rewards import Rewards, load_reward
from understudy.rollout.teacher_prompts import TeacherPrompts
from understudy.trainers.call_batching import CallQueue
from understudy.trainers.callbacks import CallbackRunner
from understudy.trainers.critic.local import ValueModel
from understudy.trainers.critic.remote import RemoteCritic
from understudy.trainers.evaluation.best_checkpoint import BestSoFar
from understudy.trainers.evaluation.evaluate import eval_prompts
from understudy.trainers.evaluation.evaluator import Evaluator
from understudy.trainers.learn.batches import Batches
from understudy.trainers.learn.refused_steps import keep_refused
from understudy.trainers.models import LoadedModel
from understudy.trainers.produce.rollouts import Rollouts
from understudy.trainers.prompt_data import PromptData, open_data, pictures_of
from understudy.trainers.remote_rows.rollouts import MODULE as ROW_WORKER
from understudy.trainers.remote_rows.rollouts import settings_of
from understudy.trainers.remote_rows.scoring import RemoteScoring
from understudy.trainers.row_columns import PARTITION
from understudy.trainers.system import Learner, MicroBatches, Producer, RunState, Saves, System, TeacherParts
from understudy.weights.publish import WeightPublisher


@dataclass(frozen=True)
class _Launch:
    """What every part of a launch is built from."""

    recipe: Recipe
    settings: Resolved
    run: RunDir
    processes: LocalProcesses
    view: LiveView
    stack: AsyncExitStack
    """Stops each part again, in the reverse of the order in which they were started."""
    gpus: Sequence[str]
    seating: Seating


@dataclass(frozen=True)
class _Inputs:
    """The student as it was loaded, and everything that it and the teachers read."""

    student: LoadedModel
    pictures: MediaStore
    vocabularies: Vocabularies
    """What the student's vocabulary and the teachers' have in common."""
    others: Mapping[str, PreTrainedTokenizerBase]
    """The tokenizers of teachers that do not have the student's."""
    rows: PromptData
    teacher_prompts: TeacherPrompts


@dataclass(frozen=True)
class _Models:
    """The models of a run, loaded or started, and what publishes the student's weights."""

    engine: Engine
    teachers: Teachers
    policy: Policy | LeadingPolicy
    publisher: WeightPublisher
    self_teachers: SelfTeachers | None
    critic: ValueModel | None
    reference: ReferenceModel | None


@dataclass(frozen=True)
class _SessionParts:
    """What the sessions of training steps and of evaluations run with."""

    renderer: Renderer
    sampling: Sampling
    loops: Loops
    rewards: Rewards


@asynccontextmanager
async def build(
    recipe: Recipe,
    run: RunDir,
    processes: LocalProcesses,
    view: LiveView,
    data: PromptData | None = None,
    callbacks: CallbackRunner | None = None,
) -> AsyncIterator[System]:
    """Start everything a run needs. All of it is stopped again at the end, also after an error.

    `data`: the prompts, if they were read already."""
    async with AsyncExitStack() as stack:
        launch = await _prepare(recipe, run, processes, view, stack)
        starting_critic = _start_critic(launch)
        inputs = await _inputs(launch, data)
        remote_scoring = RemoteScoring() if launch.settings.rows.workers_write else None
        engine, teachers = await _engine_and_teachers(launch, inputs, remote_scoring)
        policy = await _policy(launch, inputs)
        publisher = publisher_of(launch.settings.engine, policy, engine)
        checkpoints = _checkpoints(recipe, run)
        self_teachers = _self_teachers(launch, teachers, policy, checkpoints)
        await publisher.publish(0)
        if self_teachers is not None:
            await self_teachers.publish(0)
        critic = await _critic(launch, starting_critic)
        reference = await _reference(launch, inputs)
        models = _Models(engine, teachers, policy, publisher, self_teachers, critic, reference)
        plane = await _plane(launch)
        batches = await _batches(launch, inputs, models, plane)
        sessions = await _session_parts(launch, inputs, plane)
        state = await _run_state(launch, plane, checkpoints, callbacks)
        _expect_exits_when_closing(stack, models)
        rollouts = rollouts_of(
            sessions.loops,
            sessions.rewards,
            sessions.sampling,
            state,
            remote_scoring,
            pictures=inputs.student.pictures is not None,
            session_facts=bool(inputs.teacher_prompts.session_facts),
        )
        producer = _producer(launch, inputs, models, sessions, rollouts, state)
        yield System(producer, _learner(launch, models, batches, state), state)


async def _prepare(
    recipe: Recipe, run: RunDir, processes: LocalProcesses, view: LiveView, stack: AsyncExitStack
) -> _Launch:
    """Sets this process up for the recipe and connects to the cluster; says where each role is placed."""
    set_python_path(recipe.run.python_path)
    gpus = gpu_names()
    settings = resolve(recipe, len(gpus))
    set_up_torch(settings.compute)
    stack.enter_context(onednn_as_resolved(settings.compute))
    if settings.compute.device == "cpu":
        stack.enter_context(raised_gc_threshold())
    clustered = recipe.cluster.backend != "local"
    if clustered:
        view.phase(f"connecting to {recipe.cluster.backend}")
    await processes.ready()
    if clustered:
        watchers = await stack.enter_async_context(asyncio.TaskGroup())
        watcher = watchers.create_task(processes.watch(), name="watch-machines")
        stack.callback(watcher.cancel)
    seating = seat_here(recipe, gpus)
    if words := seating.shared():
        view.note(words)
    return _Launch(recipe, settings, run, processes, view, stack, gpus, seating)


def _start_critic(launch: _Launch) -> StartingCritic | None:
    """Starts the critic's process, if it has one. It loads the critic while the other parts of the run start."""
    settings = launch.settings.critic
    if settings is None or not settings.own_process:
        return None
    return StartingCritic(settings, launch.run, launch.processes, launch.seating, launch.gpus, launch.stack)


async def _inputs(launch: _Launch, data: PromptData | None) -> _Inputs:
    """Loads the student, compares the tokenizers, and reads the prompts unless they are given."""
    recipe, settings, view = launch.recipe, launch.settings, launch.view
    with view.work(f"loading the student {recipe.student.model}"):
        student = await asyncio.to_thread(load_source, settings.student)
        pictures = MediaStore(launch.run.media.absolute())
        student = student.with_pictures(pictures, settings.student.model, settings.student.revision)
    vocabularies = await find_usable_ids(
        settings.student,
        student,
        recipe.teachers,
        settings.models_beside,
        teacher_tokens(recipe.teachers),
        view.note,
    )
    others = other_tokenizers(recipe.teachers, vocabularies.aligned)
    usable = writable_ids(student, others, vocabularies.usable)
    keep_usable_ids(launch.run, usable)
    if data is None:
        data = await asyncio.to_thread(
            open_data, recipe.data, recipe.rollout, recipe.student, recipe.teachers
        )
    rows = data.storing(pictures_of(recipe.data, pictures.folder))
    teacher_prompts = teacher_prompts_of(
        recipe.teachers, recipe.rollout, student.tokenizer, others, usable, launch.stack
    )
    return _Inputs(student, pictures, replace(vocabularies, usable=usable), others, rows, teacher_prompts)


async def _engine_and_teachers(
    launch: _Launch, inputs: _Inputs, remote_scoring: RemoteScoring | None
) -> tuple[Engine, Teachers]:
    """Teachers start while the prompts are measured, the engine after that. A teacher that sits in the engine's
    processes needs them first."""
    recipe, settings, stack = launch.recipe, launch.settings, launch.stack
    # Measured by rendering every prompt, on a thread while teachers start.
    longest = asyncio.create_task(
        asyncio.to_thread(longest_request, settings.engine, recipe.data, inputs.student, inputs.rows)
    )
    stack.callback(longest.cancel)
    engine = await _engine(launch, inputs, longest) if settings.engine.scored_base is not None else None
    teachers = await start_teachers(
        settings.teachers,
        launch.processes,
        launch.seating,
        student_facts(
            settings.engine,
            recipe.data,
            recipe.teachers,
            inputs.student,
            inputs.rows.train,
            inputs.teacher_prompts,
            inputs.vocabularies,
        ),
        launch.view,
        secrets.token_urlsafe(24),
        remote_scoring,
        engine,
    )
    stack.push_async_callback(teachers.close)
    await stack.enter_async_context(open_for_requests(launch.run, teachers))
    if engine is None:
        engine = await _engine(launch, inputs, longest)
    return engine, teachers


async def _engine(launch: _Launch, inputs: _Inputs, longest: Awaitable[int | None]) -> Engine:
    """In sync mode on one rank, engine and policy share their tensors (`EngineSettings.shares_tensors`).

    The engine has its own copy if the policy is sharded (shards are gathered into it), has adapters (merged
    into it), or trains while rollouts continue. `longest` as in `open_engine`."""
    devices = rollout_devices(launch.recipe.rollout, launch.seating, launch.gpus)
    engine = await open_engine(
        launch.settings.engine, inputs.student, launch.processes, launch.view, devices, await longest
    )
    launch.stack.push_async_callback(engine.close)
    return engine


async def _policy(launch: _Launch, inputs: _Inputs) -> Policy | LeadingPolicy:
    own = policy_settings(launch.settings.learn, inputs.vocabularies.usable)
    on_bad_rows = partial(keep_refused, launch.run, "student")
    ranks = launch.settings.learn.trainer.ranks
    student = inputs.student
    if ranks == 1:
        return Policy(student.model, own, on_bad_rows=on_bad_rows, pictures=student.pictures)
    return await start_ranks(
        ranks, launch.run, launch.processes, student, own, on_bad_rows, launch.stack, launch.view
    )


def _self_teachers(
    launch: _Launch, teachers: Teachers, policy: Policy | LeadingPolicy, checkpoints: CheckpointStore
) -> SelfTeachers | None:
    return self_teachers_of(
        launch.recipe.teachers,
        launch.recipe.trainer,
        teachers.following,
        teachers.pools,
        policy,
        launch.run.path,
        checkpoints.needed,
    )


async def _critic(launch: _Launch, starting: StartingCritic | None) -> ValueModel | None:
    """The critic in its own process (`starting`), or in this process; None if the recipe has none."""
    on_bad_rows = partial(keep_refused, launch.run, "critic")
    if starting is not None:
        return await starting.ready(on_bad_rows, launch.view)
    if launch.settings.critic is None:
        return None
    return await asyncio.to_thread(critic_of, launch.settings.critic, on_bad_rows)


async def _reference(launch: _Launch, inputs: _Inputs) -> ReferenceModel | None:
    if (source := launch.settings.reference) is None:
        return None
    lanes = launch.settings.compute.lanes
    return await asyncio.to_thread(reference_of, source, lanes, inputs.vocabularies.usable, inputs.pictures)


async def _plane(launch: _Launch) -> DataPlane:
    return await open_plane(
        launch.recipe.dataplane,
        launch.run,
        launch.stack,
        drop_when_acked=launch.settings.rows.drop_when_acked,
        start_timeout=launch.recipe.cluster.start_timeout_seconds,
    )


async def _batches(launch: _Launch, inputs: _Inputs, models: _Models, plane: DataPlane) -> Batches:
    return await batches_of(
        launch.settings.learn,
        launch.settings.rows,
        plane,
        models.policy,
        models.teachers.heads,
        launch.stack,
        pictures=inputs.student.pictures is not None,
        aligned=tuple(inputs.vocabularies.aligned),
    )


async def _session_parts(launch: _Launch, inputs: _Inputs, plane: DataPlane) -> _SessionParts:
    data, engine = launch.recipe.data, launch.settings.engine
    renderer = renderer_of(engine, data, inputs.student)
    loops = await _loops(launch, renderer, plane)
    rewards = Rewards([load_reward(data.reward)] if data.reward else [], renderer)
    launch.stack.push_async_callback(rewards.close)
    sampling = sampling_of(engine, inputs.student, inputs.vocabularies.usable)
    return _SessionParts(renderer, sampling, loops, rewards)


async def _loops(launch: _Launch, renderer: Renderer, plane: Any) -> Loops:
    """The agent loops. Workers on other machines get what they need to write rows themselves."""
    recipe, row_settings = launch.recipe, None
    if launch.settings.rows.workers_write:
        deadline = recipe.rollout.deadline_seconds
        encoded = settings_of(recipe.dataplane, recipe.data.reward, deadline, launch.run, plane, PARTITION)
        row_settings = RowWorkerSettings(ROW_WORKER, plane.writer_segments, encoded)
    return await open_loops(
        recipe.rollout,
        recipe.data,
        renderer,
        launch.run.path / "tokenizer",
        launch.processes,
        launch.stack,
        row_settings,
        restarts=recipe.cluster.restarts.workers,
        notify=launch.view.note,
    )


async def _run_state(
    launch: _Launch, plane: DataPlane, checkpoints: CheckpointStore, callbacks: CallbackRunner | None
) -> RunState:
    """Opens what the run writes: metrics, spans and checkpoints."""
    run, view, stack = launch.run, launch.view, launch.stack
    metrics = _metrics(launch.recipe, run, stack, view)
    spans = Spans(run.spans)
    stack.callback(spans.close)
    view.on_note = spans.event
    saver = BackgroundSaver(checkpoints)
    stack.push_async_callback(asyncio.to_thread, saver.close)
    return RunState(
        run=run,
        plane=plane,
        metrics=metrics,
        spans=spans,
        view=view,
        saves=Saves(checkpoints, saver, BestSoFar(read_metrics(run.metrics))),
        background=await stack.enter_async_context(asyncio.TaskGroup()),
        callbacks=callbacks,
    )


def _expect_exits_when_closing(stack: AsyncExitStack, models: _Models) -> None:
    """Before `stack` ends the processes of ranks and critic, their clients stop taking an exit for a failure."""
    for part in (models.policy, models.critic):
        if isinstance(part, LeadingPolicy | RemoteCritic):
            stack.callback(part.expect_exit)


def _producer(
    launch: _Launch,
    inputs: _Inputs,
    models: _Models,
    sessions: _SessionParts,
    rollouts: Rollouts,
    state: RunState,
) -> Producer:
    recipe, held_out = launch.recipe, inputs.rows.eval
    return Producer(
        settings=launch.settings.produce,
        cursor=PromptCursor(inputs.rows.train, recipe.run.seed, recipe.data.shuffle),
        renderer=sessions.renderer,
        sampling=sessions.sampling,
        engine=models.engine,
        engine_queue=CallQueue("generate", models.engine.generate, recipe.rollout.max_batch),
        rollouts=rollouts,
        evaluator=_evaluator(launch, models, sessions),
        teachers=_teacher_parts(launch, inputs, models),
        eval_prompts=eval_prompts(held_out, recipe.trainer.eval_samples)
        if held_out and recipe.data.reward
        else [],
        state=state,
    )


def _evaluator(launch: _Launch, models: _Models, sessions: _SessionParts) -> Evaluator:
    rollout = launch.recipe.rollout
    return Evaluator(
        models.engine,
        sessions.loops,
        sessions.rewards,
        sessions.renderer,
        sessions.sampling,
        sessions.renderer.context,
        rollout.max_batch,
        rollout.deadline_seconds,
        launch.recipe.run.seed,
        rollout.max_trajectory_tokens,
    )


def _teacher_parts(launch: _Launch, inputs: _Inputs, models: _Models) -> TeacherParts:
    settings, pools = launch.settings, models.teachers.pools
    return TeacherParts(
        pools,
        router_of(settings.teachers, pools),
        teacher_queues(pools, settings.compute.deterministic),
        inputs.teacher_prompts,
        aligners_of(launch.recipe.rollout, inputs.student, inputs.others, inputs.vocabularies.usable),
        models.teachers.manifests,
        None if models.self_teachers is None else models.self_teachers.gate,
    )


def _learner(launch: _Launch, models: _Models, batches: Batches, state: RunState) -> Learner:
    return Learner(
        settings=launch.settings.learn,
        policy=models.policy,
        objective=objective_of(launch.recipe.loss),
        publisher=models.publisher,
        self_teachers=models.self_teachers,
        micro_batches=MicroBatches(launch.recipe.trainer.micro_batch_tokens),
        batches=batches,
        state=state,
        teacher_heads=models.teachers.heads,
        critic=models.critic,
        reference=models.reference,
    )


def _metrics(recipe: Recipe, run: RunDir, stack: AsyncExitStack, view: LiveView) -> LoggedMetrics:
    recipe_values = flatten(redact(recipe.model_dump()))
    folder = run.path / "loggers"
    metrics = LoggedMetrics(run.metrics, recipe.run.loggers, folder, run.path.name, recipe_values, view.note)
    stack.callback(metrics.close)
    return metrics


def _checkpoints(recipe: Recipe, run: RunDir) -> CheckpointStore:
    """The run's checkpoint store. It first removes half-written checkpoints of a crash, which is safe under
    the run's lock."""
    store = CheckpointStore(run.checkpoints, recipe.trainer.keep_checkpoints)
    store.recover()
    return store
