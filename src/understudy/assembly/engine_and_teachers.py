"""Starts the student's engine and the teachers, side by side where they do not share processes.

teachers of their own      prompts are measured ──> engine        in the engine's processes   engine ──> teachers
                           teachers start ────────────┘
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from understudy.assembly.engines import longest_request, open_engine
from understudy.assembly.inputs import Inputs
from understudy.assembly.prepare import Launch
from understudy.assembly.teachers.admin import open_for_requests
from understudy.assembly.teachers.running import Teachers
from understudy.assembly.teachers.start import BegunTeachers, start_teachers
from understudy.assembly.teachers.student_facts import student_facts
from understudy.config import DataConfig
from understudy.engines.base import Engine
from understudy.planning.resolved import EngineSettings, TeacherSettings
from understudy.planning.seating import rollout_devices
from understudy.trainers.remote_rows.scoring import RemoteScoring


async def start_engine_and_teachers(
    launch: Launch,
    inputs: Inputs,
    settings: EngineSettings,
    teacher_settings: TeacherSettings,
    data: DataConfig,
    begun: BegunTeachers,
    remote_scoring: RemoteScoring | None,
) -> tuple[Engine, Teachers]:
    """Teachers start while the prompts are measured, those in `begun` have started already; the engine starts after
    that. A teacher that sits in the engine's processes needs them first."""
    stack = launch.stack
    # Measured by rendering every prompt, on a thread while teachers start.
    longest = asyncio.create_task(
        asyncio.to_thread(longest_request, settings, data, inputs.student, inputs.rows)
    )
    stack.callback(longest.cancel)
    engine = await _engine(launch, inputs, settings, longest) if settings.scored_base is not None else None
    teachers = await start_teachers(
        teacher_settings,
        launch.processes,
        begun,
        student_facts(
            settings,
            data,
            teacher_settings.teachers,
            inputs.student,
            inputs.rows.train,
            inputs.teacher_prompts,
            inputs.vocabularies,
        ),
        launch.view,
        remote_scoring,
        engine,
    )
    stack.push_async_callback(teachers.close)
    await stack.enter_async_context(open_for_requests(launch.run, teachers))
    if engine is None:
        engine = await _engine(launch, inputs, settings, longest)
    return engine, teachers


async def _engine(
    launch: Launch, inputs: Inputs, settings: EngineSettings, longest: Awaitable[int | None]
) -> Engine:
    """In sync mode on one rank, engine and policy share their tensors (`EngineSettings.shares_tensors`).

    The engine has its own copy if the policy is sharded (shards are gathered into it), has adapters (merged
    into it), or trains while rollouts continue. `longest` as in `open_engine`."""
    devices = rollout_devices(settings.rollout, launch.seating, launch.gpus)
    engine = await open_engine(
        settings, inputs.student, launch.processes, launch.view, devices, await longest
    )
    launch.stack.push_async_callback(engine.close)
    return engine
