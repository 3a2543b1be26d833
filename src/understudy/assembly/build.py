"""Builds a running `System` from a recipe. Other modules get a section of it or a record of `Resolved`."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

from understudy.assembly.agent_loops import RowWorkerSettings, open_loops
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
from understudy.engines.base import Engine
from understudy.media.store import MediaStore
from understudy.observability.live import LiveView
from understudy.observability.loggers.logged_metrics import LoggedMetrics
from understudy.observability.metrics import read_metrics
from understudy.observability.redact import redact
from understudy.observability.rundir import RunDir
from understudy.observability.spans import Spans
from understudy.planning.resolved import Resolved, resolve
from understudy.planning.seating import rollout_devices
from understudy.planning.this_machine import seat_here
from understudy.policy.checkpoints.background import BackgroundSaver
from understudy.policy.checkpoints.checkpoint import CheckpointStore
from understudy.policy.policy import Policy
from understudy.policy.ranks.follow import LeadingPolicy
from understudy.rollout.agents.registry import Loops
from understudy.rollout.cursor import PromptCursor
from understudy.rollout.loading import look_in
from understudy.rollout.render import Renderer
from understudy.rollout.rewards.rewards import Rewards, load_reward
from understudy.rollout.timing import BatchTimings
from understudy.rollout.workers.pool import LoopWorkers
from understudy.trainers.call_batching import CallQueue
from understudy.trainers.callbacks import CallbackRunner
from understudy.trainers.critic.local import ValueModel
from understudy.trainers.critic.remote import RemoteCritic
from understudy.trainers.evaluation.best_checkpoint import BestSoFar
from understudy.trainers.evaluation.evaluate import eval_prompts
from understudy.trainers.evaluation.evaluator import Evaluator
from understudy.trainers.learn.refused_steps import keep_refused
from understudy.trainers.models import LoadedModel
from understudy.trainers.produce.rollouts import LocalRollouts, Rollouts
from understudy.trainers.prompt_data import PromptData, open_data, pictures_of
from understudy.trainers.remote_rows.references import RemotePlane
from understudy.trainers.remote_rows.rollouts import MODULE as ROW_WORKER
from understudy.trainers.remote_rows.rollouts import RemoteRollouts, settings_of
from understudy.trainers.remote_rows.scoring import RemoteScoring
from understudy.trainers.row_columns import PARTITION
from understudy.trainers.system import Learner, MicroBatches, Producer, RunState, Saves, System, TeacherParts
from understudy.types.usable_ids import UsableIds


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
        look_in(recipe.run.python_path)
        gpus = gpu_names()
        settings = resolve(recipe, len(gpus))
        deterministic = settings.compute.deterministic
        steady_torch(settings.compute)
        stack.enter_context(products_of_lanes(settings.compute))
        if settings.compute.device == "cpu":
            stack.enter_context(rare_collection())
        if recipe.cluster.backend != "local":
            view.phase(f"connecting to {recipe.cluster.backend}")
        await processes.ready()
        if recipe.cluster.backend != "local":
            watchers = await stack.enter_async_context(asyncio.TaskGroup())
            watcher = watchers.create_task(processes.watch(), name="watch-machines")
            stack.callback(watcher.cancel)
        seating = seat_here(recipe, gpus)
        if words := seating.shared():
            view.note(words)
        coming = None
        if settings.critic is not None and settings.critic.own_process:
            coming = StartingCritic(settings.critic, run, processes, seating, gpus, stack)
        with view.work(f"loading the student {recipe.student.model}"):
            student = await asyncio.to_thread(load_source, settings.student)
            store = MediaStore(run.media.absolute())
            student = student.reading(store, settings.student.model, settings.student.revision)
        vocabularies = await find_usable_ids(
            settings.student,
            student,
            recipe.teachers,
            settings.models_beside,
            teacher_tokens(recipe.teachers),
            view.note,
        )
        aligned = vocabularies.aligned
        others = other_tokenizers(recipe.teachers, aligned)
        usable = writable_ids(student, others, vocabularies.usable)
        keep_usable_ids(run, usable)
        if data is None:
            data = await asyncio.to_thread(
                open_data, recipe.data, recipe.rollout, recipe.student, recipe.teachers
            )
        rows = data.storing(pictures_of(recipe.data, store.folder))
        prompts = rows.train
        remote_scoring = RemoteScoring() if settings.rows.workers_write else None
        own_prompts = teacher_prompts_of(
            recipe.teachers, recipe.rollout, student.tokenizer, others, usable, stack
        )
        # Renders every prompt, on a thread while teachers start.
        longest = asyncio.create_task(
            asyncio.to_thread(longest_request, settings.engine, recipe.data, student, rows)
        )
        stack.callback(longest.cancel)
        opening = partial(
            _engine,
            settings,
            rollout_devices(recipe.rollout, seating, gpus),
            processes,
            student,
            view,
            longest,
            stack,
        )
        # A teacher in the engine's processes starts after them; the others start first, while prompts are measured.
        engine = await opening() if settings.engine.scored_base is not None else None
        teachers = await start_teachers(
            settings.teachers,
            processes,
            seating,
            student_facts(
                settings.engine,
                recipe.data,
                recipe.teachers,
                student,
                prompts,
                own_prompts,
                Vocabularies(usable, aligned),
            ),
            view,
            secrets.token_urlsafe(24),
            remote_scoring,
            engine,
        )
        stack.push_async_callback(teachers.close)
        await stack.enter_async_context(open_for_requests(run, teachers))
        pools = teachers.pools

        if engine is None:
            engine = await opening()
        policy = await _policy(settings, run, processes, student, usable, stack, view)
        publisher = publisher_of(settings.engine, policy, engine)
        checkpoints = _checkpoints(recipe, run)
        self_teachers = self_teachers_of(
            recipe.teachers,
            recipe.trainer,
            teachers.following,
            pools,
            policy,
            run.path,
            checkpoints.resumable,
        )
        await publisher.publish(0)
        if self_teachers is not None:
            await self_teachers.publish(0)
        critic = await _critic(settings, run, coming, view)
        reference = None
        if (source := settings.reference) is not None:
            reference = await asyncio.to_thread(reference_of, source, settings.compute.lanes, usable, store)
        plane = await open_plane(
            recipe.dataplane,
            run,
            stack,
            drop_when_acked=settings.rows.drop_when_acked,
            start_timeout=recipe.cluster.start_timeout_seconds,
        )
        sees = student.pictures is not None
        batches = await batches_of(
            settings.learn,
            settings.rows,
            plane,
            policy,
            teachers.heads,
            stack,
            pictures=sees,
            aligned=tuple(aligned),
        )
        renderer = renderer_of(settings.engine, recipe.data, student)
        loops = await _loops(settings, recipe, run, renderer, processes, plane, stack, view.note)
        rewards = Rewards([load_reward(recipe.data.reward)] if recipe.data.reward else [], renderer)
        stack.push_async_callback(rewards.close)
        metrics = _metrics(recipe, run, stack, view)
        spans = Spans(run.spans)
        stack.callback(spans.close)
        view.on_note = spans.event
        sampling, timings = sampling_of(settings.engine, student, usable), BatchTimings()
        rollouts: Rollouts
        if remote_scoring is not None:
            assert isinstance(loops, LoopWorkers)
            remote = RemotePlane(plane, PARTITION)
            remote_scoring.open(loops, remote)
            rollouts = RemoteRollouts(loops, remote, spans, timings, sampling.candidates > 0)
        else:
            rollouts = LocalRollouts(
                loops, rewards, plane, sampling, spans, timings, sees, bool(own_prompts.session_facts)
            )
        saver = BackgroundSaver(checkpoints)
        stack.push_async_callback(asyncio.to_thread, saver.close)
        background = await stack.enter_async_context(asyncio.TaskGroup())
        if isinstance(policy, LeadingPolicy):
            stack.callback(policy.expect_exit)
        if isinstance(critic, RemoteCritic):
            stack.callback(critic.expect_exit)
        state = RunState(
            run=run,
            plane=plane,
            metrics=metrics,
            spans=spans,
            view=view,
            saves=Saves(checkpoints, saver, BestSoFar(read_metrics(run.metrics))),
            background=background,
            timings=timings,
            callbacks=callbacks,
        )
        producer = Producer(
            settings=settings.produce,
            cursor=PromptCursor(prompts, recipe.run.seed, recipe.data.shuffle),
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
            ),
            teachers=TeacherParts(
                pools,
                router_of(settings.teachers, pools),
                teacher_queues(pools, deterministic),
                own_prompts,
                aligners_of(student, others, usable),
                partial(manifests_of, pools),
                None if self_teachers is None else self_teachers.gate,
            ),
            eval_prompts=eval_prompts(rows.eval, recipe.trainer.eval_samples)
            if rows.eval and recipe.data.reward
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


async def _critic(
    settings: Resolved, run: RunDir, coming: StartingCritic | None, view: LiveView
) -> ValueModel | None:
    """The critic in its own process (`coming`), or in this process; None if the recipe has none."""
    on_bad_rows = partial(keep_refused, run, "critic")
    if coming is not None:
        return await coming.arrived(on_bad_rows, view)
    if settings.critic is None:
        return None
    return await asyncio.to_thread(critic_of, settings.critic, on_bad_rows)


async def _loops(
    settings: Resolved,
    recipe: Recipe,
    run: RunDir,
    renderer: Renderer,
    processes: LocalProcesses,
    plane: Any,
    stack: AsyncExitStack,
    notify: Callable[[str], None],
) -> Loops:
    """The agent loops. Workers on other machines get what they need to write rows themselves."""
    row_settings = None
    if settings.rows.workers_write:
        deadline = recipe.rollout.deadline_seconds
        told = settings_of(recipe.dataplane, recipe.data.reward, deadline, run, plane, PARTITION)
        row_settings = RowWorkerSettings(ROW_WORKER, plane.writer_segments, told)
    return await open_loops(
        recipe.rollout,
        recipe.data,
        renderer,
        run.path / "tokenizer",
        processes,
        stack,
        row_settings,
        restarts=recipe.cluster.restarts.workers,
        notify=notify,
    )


async def _engine(
    settings: Resolved,
    devices: Sequence[str],
    processes: LocalProcesses,
    student: LoadedModel,
    view: LiveView,
    longest: Awaitable[int | None],
    stack: AsyncExitStack,
) -> Engine:
    """In sync mode on one rank, engine and policy share their tensors (`EngineSettings.shares_tensors`).

    The engine has its own copy if the policy is sharded (shards are gathered into it), has adapters (merged
    into it), or trains while rollouts continue. `devices` and `longest` as in `open_engine`."""
    engine = await open_engine(settings.engine, student, processes, view, devices, await longest)
    stack.push_async_callback(engine.close)
    return engine


async def _policy(
    settings: Resolved,
    run: RunDir,
    processes: LocalProcesses,
    student: LoadedModel,
    usable: UsableIds | None,
    stack: AsyncExitStack,
    view: LiveView,
) -> Policy | LeadingPolicy:
    own, on_bad_rows = policy_settings(settings.learn, usable), partial(keep_refused, run, "student")
    ranks = settings.learn.trainer.ranks
    if ranks == 1:
        return Policy(student.model, own, on_bad_rows=on_bad_rows, pictures=student.pictures)
    return await start_ranks(ranks, run, processes, student, own, on_bad_rows, stack, view)


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
