"""Builds a running `System` from a recipe. Other modules get a section of it or a record of `Resolved`."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from understudy.assembly.agent_loops import RowWorkerSettings, open_loops, rollouts_of
from understudy.assembly.backends import open_plane
from understudy.assembly.cpu_threads import products_of_lanes, rare_collection, steady_torch
from understudy.assembly.critic import StartingCritic, critic_of, reference_of
from understudy.assembly.engines import open_engine, publisher_of, sampling_of
from understudy.assembly.learner import batches_of, load_source, objective_of, policy_settings
from understudy.assembly.prompt_facts import (
    aligners_of,
    longest_request,
    other_tokenizers,
    renderer_of,
    student_facts,
    teacher_prompts_of,
    writable_ids,
)
from understudy.assembly.ranks import start_ranks
from understudy.assembly.self_teachers import self_teachers_of
from understudy.assembly.teacher_admin import open_for_requests
from understudy.assembly.teachers import (
    Teachers,
    manifests_of,
    router_of,
    start_teachers,
    teacher_queues,
    teacher_tokens,
)
from understudy.assembly.this_machine import gpu_names
from understudy.assembly.usable_ids import Vocabularies, find_usable_ids, keep_usable_ids
from understudy.cluster.local import LocalProcesses
from understudy.config import Recipe
from understudy.config.base import flatten
from understudy.dataplane.base import DataPlane
from understudy.engines.base import Engine
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
from understudy.rollout.loading import look_in
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
from understudy.trainers.learn.refused_steps import keep_refused
from understudy.trainers.models import LoadedModel
from understudy.trainers.prompt_data import PromptData, open_data, pictures_of
from understudy.trainers.remote_rows.rollouts import MODULE as ROW_WORKER
from understudy.trainers.remote_rows.rollouts import settings_of
from understudy.trainers.remote_rows.scoring import RemoteScoring
from understudy.trainers.row_columns import PARTITION
from understudy.trainers.system import Learner, MicroBatches, Producer, RunState, Saves, System, TeacherParts


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
        settings = launch.settings
        coming = _starting_critic(launch)
        inputs = await _inputs(launch, data)
        remote_scoring = RemoteScoring() if settings.rows.workers_write else None
        engine, teachers = await _engine_and_teachers(launch, inputs, remote_scoring)
        policy = await _policy(launch, inputs)
        publisher = publisher_of(settings.engine, policy, engine)
        checkpoints = _checkpoints(recipe, run)
        self_teachers = self_teachers_of(
            recipe.teachers,
            recipe.trainer,
            teachers.following,
            teachers.pools,
            policy,
            run.path,
            checkpoints.needed,
        )
        await publisher.publish(0)
        if self_teachers is not None:
            await self_teachers.publish(0)
        critic = await _critic(launch, coming)
        reference = await _reference(launch, inputs)
        plane = await open_plane(
            recipe.dataplane,
            run,
            stack,
            drop_when_acked=settings.rows.drop_when_acked,
            start_timeout=recipe.cluster.start_timeout_seconds,
        )
        batches = await batches_of(
            settings.learn,
            settings.rows,
            plane,
            policy,
            teachers.heads,
            stack,
            pictures=inputs.student.pictures is not None,
            aligned=tuple(inputs.vocabularies.aligned),
        )
        renderer = renderer_of(settings.engine, recipe.data, inputs.student)
        loops = await _loops(launch, renderer, plane)
        rewards = Rewards([load_reward(recipe.data.reward)] if recipe.data.reward else [], renderer)
        stack.push_async_callback(rewards.close)
        state = await _run_state(launch, plane, checkpoints, callbacks)
        for part in (policy, critic):
            if isinstance(part, LeadingPolicy | RemoteCritic):
                stack.callback(part.expect_exit)
        sampling = sampling_of(settings.engine, inputs.student, inputs.vocabularies.usable)
        rollouts = rollouts_of(
            loops,
            rewards,
            sampling,
            state,
            remote_scoring,
            pictures=inputs.student.pictures is not None,
            session_facts=bool(inputs.teacher_prompts.session_facts),
        )
        producer = Producer(
            settings=settings.produce,
            cursor=PromptCursor(inputs.rows.train, recipe.run.seed, recipe.data.shuffle),
            renderer=renderer,
            sampling=sampling,
            engine=engine,
            engine_queue=CallQueue("generate", engine.generate, recipe.rollout.max_batch),
            rollouts=rollouts,
            evaluator=Evaluator(
                engine,
                loops,
                rewards,
                renderer,
                sampling,
                renderer.context,
                recipe.rollout.max_batch,
                recipe.rollout.deadline_seconds,
                recipe.run.seed,
                recipe.rollout.max_trajectory_tokens,
            ),
            teachers=TeacherParts(
                teachers.pools,
                router_of(settings.teachers, teachers.pools),
                teacher_queues(teachers.pools, settings.compute.deterministic),
                inputs.teacher_prompts,
                aligners_of(recipe.rollout, inputs.student, inputs.others, inputs.vocabularies.usable),
                partial(manifests_of, teachers.pools),
                None if self_teachers is None else self_teachers.gate,
            ),
            eval_prompts=eval_prompts(inputs.rows.eval, recipe.trainer.eval_samples)
            if inputs.rows.eval and recipe.data.reward
            else [],
            state=state,
        )
        learner = Learner(
            settings=settings.learn,
            policy=policy,
            objective=objective_of(recipe.loss),
            publisher=publisher,
            self_teachers=self_teachers,
            micro_batches=MicroBatches(recipe.trainer.micro_batch_tokens),
            batches=batches,
            state=state,
            teacher_heads=teachers.heads,
            critic=critic,
            reference=reference,
        )
        yield System(producer, learner, state)


async def _prepare(
    recipe: Recipe, run: RunDir, processes: LocalProcesses, view: LiveView, stack: AsyncExitStack
) -> _Launch:
    """Sets this process up for the recipe and connects to the cluster; says where each role is placed."""
    look_in(recipe.run.python_path)
    gpus = gpu_names()
    settings = resolve(recipe, len(gpus))
    steady_torch(settings.compute)
    stack.enter_context(products_of_lanes(settings.compute))
    if settings.compute.device == "cpu":
        stack.enter_context(rare_collection())
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


def _starting_critic(launch: _Launch) -> StartingCritic | None:
    """Starts the critic's process, if it has one. It loads while everything else starts."""
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
        student = student.reading(pictures, settings.student.model, settings.student.revision)
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
    # Renders every prompt, on a thread while teachers start.
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


async def _critic(launch: _Launch, coming: StartingCritic | None) -> ValueModel | None:
    """The critic in its own process (`coming`), or in this process; None if the recipe has none."""
    on_bad_rows = partial(keep_refused, launch.run, "critic")
    if coming is not None:
        return await coming.arrived(on_bad_rows, launch.view)
    if launch.settings.critic is None:
        return None
    return await asyncio.to_thread(critic_of, launch.settings.critic, on_bad_rows)


async def _reference(launch: _Launch, inputs: _Inputs) -> ReferenceModel | None:
    if (source := launch.settings.reference) is None:
        return None
    lanes = launch.settings.compute.lanes
    return await asyncio.to_thread(reference_of, source, lanes, inputs.vocabularies.usable, inputs.pictures)


async def _loops(launch: _Launch, renderer: Renderer, plane: Any) -> Loops:
    """The agent loops. Workers on other machines get what they need to write rows themselves."""
    recipe, row_settings = launch.recipe, None
    if launch.settings.rows.workers_write:
        deadline = recipe.rollout.deadline_seconds
        told = settings_of(recipe.dataplane, recipe.data.reward, deadline, launch.run, plane, PARTITION)
        row_settings = RowWorkerSettings(ROW_WORKER, plane.writer_segments, told)
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


def _metrics(recipe: Recipe, run: RunDir, stack: AsyncExitStack, view: LiveView) -> LoggedMetrics:
    told = flatten(redact(recipe.model_dump()))
    folder = run.path / "loggers"
    metrics = LoggedMetrics(run.metrics, recipe.run.loggers, folder, run.path.name, told, view.note)
    stack.callback(metrics.close)
    return metrics


def _checkpoints(recipe: Recipe, run: RunDir) -> CheckpointStore:
    """The run's checkpoint store. It first removes half-written checkpoints of a crash, which is safe under
    the run's lock."""
    store = CheckpointStore(run.checkpoints, recipe.trainer.keep_checkpoints)
    store.recover()
    return store
