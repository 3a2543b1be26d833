"""Starts the teachers of a recipe: connects the processes of `cluster` with the pools of `teacher`.

recipe ─> seats ─> replicas start ─> each is checked    ─> fits this recipe? ─> router, call queues
                   launchers.py      (manifest, scores)    fit.py               queues.py

`begin_teachers` starts the replicas that need nothing of the student while it is loaded; `start_teachers` does the rest.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from understudy.assembly.teachers.clients import connect_of, token_of
from understudy.assembly.teachers.fit import check_fit, check_tokens, warn_of_unseen
from understudy.assembly.teachers.following import FollowingReplicas
from understudy.assembly.teachers.launchers import EngineTeachers, LocalTeachers, VLLMTeachers
from understudy.assembly.teachers.running import TeacherLauncher, Teachers
from understudy.assembly.teachers.student_facts import StudentFacts
from understudy.assembly.this_machine import gpu_names
from understudy.cluster.local import LocalProcesses
from understudy.config import TeacherConfig
from understudy.engines.base import Engine
from understudy.engines.hosted.engine import HostedEngine
from understudy.observability.live import LiveView
from understudy.observability.report import many
from understudy.planning.resolved import TeacherSettings
from understudy.planning.seating import Seating, Seats
from understudy.serving.endpoint import Endpoint
from understudy.serving.supervisor import Restarts
from understudy.teacher.clients.native import ReplicaClient
from understudy.teacher.head_frame import WireHead
from understudy.teacher.manifest import RequestBatching
from understudy.teacher.pool.events import EventKind, PoolEvent, log_event
from understudy.teacher.pool.health import HealthRules
from understudy.teacher.pool.launch import ReplicaSpec
from understudy.teacher.pool.options import PoolOptions, SupervisorOptions
from understudy.teacher.pool.pool import TeacherPool
from understudy.teacher.replica.in_process import LoraBaseReplica, LoraBaseTeacher
from understudy.trainers.remote_rows.scoring import RemoteScoring
from understudy.types.loss import TeacherHead
from understudy.types.scores import Signal

_NOTED = (
    EventKind.PAUSED,
    EventKind.RESUMED,
    EventKind.EJECTED,
    EventKind.RESTARTED,
    EventKind.READMITTED,
    EventKind.ADDED,
    EventKind.REMOVED,
)
"""The events that are shown to the user. The log has all of them."""


@dataclass(frozen=True, slots=True)
class _Launch:
    """What every teacher of a launch is started with."""

    settings: TeacherSettings
    processes: LocalProcesses
    begun: BegunTeachers
    student: StudentFacts
    view: LiveView
    remote: RemoteScoring | None
    engine: Engine | None


@dataclass(frozen=True, slots=True)
class BegunTeachers:
    """What is settled of a launch's teachers before the student is loaded."""

    seats: Seats
    token: str
    """The bearer token of the replicas that this run starts."""
    batching: RequestBatching
    """How replicas of this run batch requests."""
    launchers: Mapping[str, LocalTeachers]
    """By teacher: those whose replicas are starting."""

    async def stop(self) -> None:
        """Stops the replicas that no pool has taken over."""
        await asyncio.gather(*(launcher.stop_begun() for launcher in self.launchers.values()))


def begin_teachers(settings: TeacherSettings, processes: LocalProcesses, seating: Seating) -> BegunTeachers:
    """Starts the replicas in processes of our own that do not follow the student. Call `stop` when the launch ends:
    it may end before `start_teachers` does."""
    batching = RequestBatching.BY_REQUEST if settings.deterministic else RequestBatching.BY_ARRIVAL
    seats, token = Seats(seating, gpu_names()), secrets.token_urlsafe(24)
    launchers = {
        name: LocalTeachers(processes, name, teacher, batching, token, seats)
        for name, teacher in settings.teachers.items()
        if teacher.placement in ("standalone", "pool")
        and not (teacher.starts_vllm or teacher.follows_student)
    }
    for launcher in launchers.values():
        launcher.begin()
    return BegunTeachers(seats, token, batching, launchers)


async def start_teachers(
    settings: TeacherSettings,
    processes: LocalProcesses,
    begun: BegunTeachers,
    student: StudentFacts,
    view: LiveView,
    remote: RemoteScoring | None = None,
    engine: Engine | None = None,
) -> Teachers:
    """Starts all teachers at once and checks them against the student. If one fails, all are stopped.

    With `remote`, workers send the requests for remote rows. `engine`: the student's, for teachers with
    `placement = "engine"`."""
    teachers = Teachers({})
    launch = _Launch(settings, processes, begun, student, view, remote, engine)
    for name, teacher in settings.teachers.items():
        if teacher.placement == "external":
            teachers.tokens[name] = token_of(name, teacher)
        else:
            place = sum(isinstance(one, EngineTeachers) for one in teachers.launchers.values())
            teachers.launchers[name] = _launcher(launch, name, teacher, place)
        teachers.pools[name] = _pool(launch, name, teacher, teachers)
    replicas = sum(
        len(teacher.urls) or _replicas(teacher, teachers.launchers.get(name))
        for name, teacher in settings.teachers.items()
    )
    view.phase(f"starting {many(len(teachers.pools), 'teacher')}, {many(replicas, 'replica')}")
    try:
        async with asyncio.TaskGroup() as tasks:
            for name in teachers.pools:
                tasks.create_task(_start(teachers, name, settings, student))
    except BaseException:
        await teachers.close()
        raise
    view.phase("")
    return teachers


def _launcher(launch: _Launch, name: str, teacher: TeacherConfig, place: int) -> TeacherLauncher:
    """What starts the replicas of a teacher that is not external. `place`: how many teachers sit in the engine's
    processes already."""
    if name in launch.begun.launchers:
        return launch.begun.launchers[name]
    processes, student, begun = launch.processes, launch.student, launch.begun
    batching, token, seats = begun.batching, begun.token, begun.seats
    if teacher.placement == "trainer":
        assert student.base is not None
        return LoraBaseTeacher(LoraBaseReplica.of(name, teacher, batching), token, student.base)
    if teacher.placement == "engine":
        assert isinstance(launch.engine, HostedEngine)
        return EngineTeachers(processes, name, launch.engine, place)
    if teacher.starts_vllm:
        k = launch.settings.topk
        return VLLMTeachers(processes, name, teacher, batching, token, seats, k, student.family)
    launcher = LocalTeachers(processes, name, teacher, batching, token, seats)
    launcher.following = FollowingReplicas(name, student.weight_bytes, processes.address)
    return launcher


def _replicas(teacher: TeacherConfig, launcher: TeacherLauncher | None) -> int:
    return launcher.replicas if isinstance(launcher, EngineTeachers) else teacher.replicas


def _pool(launch: _Launch, name: str, teacher: TeacherConfig, teachers: Teachers) -> TeacherPool:
    def on_event(event: PoolEvent) -> None:
        log_event(event)
        if event.kind in _NOTED:
            launch.view.note(f"teacher {event.teacher}: {event.message}")

    restarts = Restarts(most=launch.settings.restarts)
    options = PoolOptions(
        deadline_base=teacher.deadline_seconds,
        hedge_after=teacher.hedge_after_seconds,
        cache_bytes=teacher.cache_bytes,
        # For processes of this run, `cluster.restarts.teacher` decides when the pool gives up.
        outage_most=teacher.outage_seconds if teacher.placement == "external" else None,
        supervisor=SupervisorOptions(
            health=HealthRules(restarts=restarts), external_wait=launch.settings.start_seconds
        ),
    )
    launcher = teachers.launchers.get(name)
    if launcher is None:
        endpoints = [Endpoint(url, teachers.tokens[name]) for url in teacher.urls]
        specs = [ReplicaSpec(str(i), endpoint) for i, endpoint in enumerate(endpoints)]
    else:
        specs = [ReplicaSpec(str(i)) for i in range(_replicas(teacher, launcher))]
    connect = connect_of(
        name, teacher, launch.student, launch.settings.topk, launch.begun.batching, launch.remote
    )
    return TeacherPool(name, specs, launcher, options=options, connect=connect, on_event=on_event)


async def _start(teachers: Teachers, name: str, settings: TeacherSettings, student: StudentFacts) -> None:
    """Starts a teacher and checks that it fits the recipe: its signals, its context and its vocabulary."""
    pool, teacher = teachers.pools[name], settings.teachers[name]
    await pool.start()
    manifest = pool.manifest
    await check_fit(name, manifest, settings, student)
    if teacher.starts_vllm:
        return  # it loaded the files that `check` compared
    if manifest.backend != "native":
        warn_of_unseen(name, manifest)
        return
    launcher = teachers.launchers.get(name)
    endpoint = launcher.endpoints["0"] if launcher else Endpoint(teacher.urls[0], teachers.tokens[name])
    async with ReplicaClient(endpoint.url, endpoint.token, teacher=name) as client:
        await check_tokens(name, teacher.model, manifest, client, student)
        if Signal(settings.signal) is Signal.HIDDEN:
            teachers.heads[name] = _head(await client.head(), settings.temperature, student.device)


def _head(wire: WireHead, temperature: float, device: torch.device) -> TeacherHead:
    """The teacher's output head on the student's device. bfloat16 arrives as raw bits, because numpy has no
    bfloat16."""

    def tensor(array: np.ndarray) -> torch.Tensor:
        found = torch.from_numpy(np.array(array))
        return (found.view(torch.bfloat16) if found.dtype == torch.uint16 else found).to(device)

    return TeacherHead(
        weight_VH=tensor(wire.weight_VH),
        bias_V=None if wire.bias_V is None else tensor(wire.bias_V),
        softcap=wire.softcap,
        logit_scale=wire.scale,
        temperature=temperature,
    )
