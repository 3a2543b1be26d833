"""Builds a running `System` from a recipe. Other modules get a section of it or a record of `Resolved`.

    prepare.py                torch, cluster ─> `Launch`
    inputs.py                 student, tokenizers, prompts ─> `Inputs`
    engine_and_teachers.py, learner.py, critic.py       models; the student's weights are published as version 0
    backends.py, learner.py, sessions.py, run_state.py  rows, batches, agent loops and rewards, files of the run
    here                      the records that the schedules use

`build` calls these stages in this order, and its exit stack stops the parts in the reverse order.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from understudy.assembly.backends import open_plane
from understudy.assembly.critic import open_critic, reference_of, start_critic
from understudy.assembly.engine_and_teachers import start_engine_and_teachers
from understudy.assembly.engines import publisher_of
from understudy.assembly.inputs import Inputs, load_inputs
from understudy.assembly.learner import batches_of, objective_of, open_policy
from understudy.assembly.prepare import Launch, prepare
from understudy.assembly.run_state import open_checkpoints, open_run_state
from understudy.assembly.sessions import SessionParts, evaluator_of, open_sessions, rollouts_of
from understudy.assembly.teachers.following import SelfTeachers, self_teachers_of
from understudy.assembly.teachers.queues import teacher_parts
from understudy.assembly.teachers.running import Teachers
from understudy.assembly.teachers.start import begin_teachers
from understudy.assembly.this_machine import gpu_names
from understudy.cluster.local import LocalProcesses
from understudy.config import Recipe
from understudy.config.base import flatten
from understudy.engines.base import Engine
from understudy.observability.live import LiveView
from understudy.observability.redact import redact
from understudy.observability.rundir import RunDir
from understudy.planning.resolved import Resolved, resolve
from understudy.planning.this_machine import seat_here
from understudy.policy.policy import Policy
from understudy.policy.ranks.follow import LeadingPolicy
from understudy.policy.reference import ReferenceModel
from understudy.rollout.cursor import PromptCursor
from understudy.trainers.call_batching import CallQueue
from understudy.trainers.callbacks import CallbackRunner
from understudy.trainers.critic.local import ValueModel
from understudy.trainers.critic.remote import RemoteCritic
from understudy.trainers.evaluation.evaluate import eval_prompts
from understudy.trainers.learn.batches import Batches
from understudy.trainers.learn.refused_steps import keep_refused
from understudy.trainers.produce.rollouts import Rollouts
from understudy.trainers.prompt_data import PromptData
from understudy.trainers.remote_rows.scoring import RemoteScoring
from understudy.trainers.system import Learner, MicroBatches, Producer, RunState, System
from understudy.weights.publish import WeightPublisher


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
        gpus = gpu_names()
        settings = resolve(recipe, len(gpus))
        launch = Launch(run, processes, view, stack, gpus, seat_here(recipe, gpus))
        await prepare(launch, settings.compute, recipe.cluster, recipe.run.python_path)
        starting_critic = start_critic(launch, settings.critic)
        begun_teachers = begin_teachers(settings.teachers, processes, launch.seating)
        stack.push_async_callback(begun_teachers.stop)
        inputs = await load_inputs(
            launch,
            settings.student,
            settings.models_beside,
            recipe.student,
            recipe.teachers,
            recipe.data,
            recipe.rollout,
            data,
        )
        remote_scoring = RemoteScoring() if settings.rows.workers_write else None
        engine, teachers = await start_engine_and_teachers(
            launch, inputs, settings.engine, settings.teachers, recipe.data, begun_teachers, remote_scoring
        )
        policy = await open_policy(
            launch, settings.learn, inputs.student, inputs.usable, partial(keep_refused, run, "student")
        )
        publisher = publisher_of(settings.engine, policy, engine)
        checkpoints = open_checkpoints(run, recipe.trainer.keep_checkpoints)
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
        critic = await open_critic(
            launch, settings.critic, starting_critic, partial(keep_refused, run, "critic")
        )
        reference = await _reference(settings, inputs)
        models = _Models(engine, teachers, policy, publisher, self_teachers, critic, reference)
        plane = await open_plane(
            recipe.dataplane,
            run,
            stack,
            drop_when_acked=settings.rows.drop_when_acked,
            start_timeout=recipe.cluster.start_timeout_seconds,
        )
        reads_pictures = inputs.student.pictures is not None
        batches = await batches_of(
            settings.learn,
            settings.rows,
            plane,
            policy,
            teachers.heads,
            stack,
            pictures=reads_pictures,
            aligned=tuple(inputs.vocabularies.aligned),
        )
        sessions = await open_sessions(
            launch,
            inputs,
            plane,
            settings.engine,
            settings.rows,
            recipe.data,
            recipe.dataplane,
            recipe.cluster.restarts.workers,
        )
        recipe_values = flatten(redact(recipe.model_dump()))
        state = await open_run_state(launch, plane, checkpoints, recipe.run.loggers, recipe_values, callbacks)
        _expect_exits_when_closing(stack, models)
        session_facts = bool(inputs.teacher_prompts.session_facts)
        rollouts = rollouts_of(
            sessions, state, remote_scoring, pictures=reads_pictures, session_facts=session_facts
        )
        producer = _producer(recipe, settings, inputs, models, sessions, rollouts, state)
        yield System(producer, _learner(recipe, settings, models, batches, state), state)


async def _reference(settings: Resolved, inputs: Inputs) -> ReferenceModel | None:
    if settings.reference is None:
        return None
    lanes = settings.compute.lanes
    return await asyncio.to_thread(reference_of, settings.reference, lanes, inputs.usable, inputs.pictures)


def _expect_exits_when_closing(stack: AsyncExitStack, models: _Models) -> None:
    """Before `stack` ends the processes of ranks and critic, their clients stop taking an exit for a failure."""
    for part in (models.policy, models.critic):
        if isinstance(part, LeadingPolicy | RemoteCritic):
            stack.callback(part.expect_exit)


def _producer(
    recipe: Recipe,
    settings: Resolved,
    inputs: Inputs,
    models: _Models,
    sessions: SessionParts,
    rollouts: Rollouts,
    state: RunState,
) -> Producer:
    held_out, gate = inputs.rows.eval, None if models.self_teachers is None else models.self_teachers.gate
    return Producer(
        settings=settings.produce,
        cursor=PromptCursor(inputs.rows.train, recipe.run.seed, recipe.data.shuffle),
        renderer=sessions.renderer,
        sampling=sessions.sampling,
        engine=models.engine,
        engine_queue=CallQueue("generate", models.engine.generate, recipe.rollout.max_batch),
        rollouts=rollouts,
        evaluator=evaluator_of(sessions, models.engine, recipe.rollout, recipe.run.seed),
        teachers=teacher_parts(models.teachers, inputs, settings.teachers, recipe.rollout, gate),
        eval_prompts=eval_prompts(held_out, recipe.trainer.eval_samples)
        if held_out and recipe.data.reward
        else [],
        state=state,
    )


def _learner(
    recipe: Recipe, settings: Resolved, models: _Models, batches: Batches, state: RunState
) -> Learner:
    return Learner(
        settings=settings.learn,
        policy=models.policy,
        objective=objective_of(recipe.loss),
        publisher=models.publisher,
        self_teachers=models.self_teachers,
        micro_batches=MicroBatches(recipe.trainer.micro_batch_tokens),
        batches=batches,
        state=state,
        teacher_heads=models.teachers.heads,
        critic=models.critic,
        reference=models.reference,
    )
