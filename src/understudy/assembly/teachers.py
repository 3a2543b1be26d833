"""Starts the teachers of a recipe: connects the processes of `cluster` with the pools of `teacher`.

recipe ─> seats ─> replicas start ─> each is checked    ─> fits this recipe?              ─> router, call queues
                                     (manifest, scores)    (signals, K, context, vocabulary)
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch

from understudy.assembly.self_teachers import FollowingReplicas
from understudy.assembly.teacher_processes import EngineTeachers, LocalTeachers, VLLMTeachers
from understudy.assembly.this_machine import gpu_names
from understudy.cluster.local import LocalProcesses
from understudy.config import TeacherConfig
from understudy.engines.base import Engine
from understudy.engines.hosted.engine import HostedEngine
from understudy.errors import ConfigError, TeacherError
from understudy.media.processor import PictureReader, patching_difference
from understudy.media.store import MediaStore
from understudy.observability.live import LiveView
from understudy.observability.report import many
from understudy.planning.models.pairs import Side
from understudy.planning.resolved import TeacherSettings
from understudy.planning.seating import Seating, Seats
from understudy.serving.endpoint import Endpoint
from understudy.serving.supervisor import Restarts
from understudy.teacher.clients.discover import ExternalServer
from understudy.teacher.clients.native import ReplicaClient
from understudy.teacher.head_frame import WireHead
from understudy.teacher.manifest import Manifest, RequestBatching
from understudy.teacher.mixture import needed_signals
from understudy.teacher.pool.events import EventKind, PoolEvent, log_event
from understudy.teacher.pool.health import HealthRules
from understudy.teacher.pool.integrity import check_row, check_signals, check_vocabulary
from understudy.teacher.pool.launch import ReplicaSpec
from understudy.teacher.pool.pool import PoolOptions, TeacherPool
from understudy.teacher.pool.supervisor import Connect, SupervisorOptions, connect_native
from understudy.teacher.replica.in_process import LoraBaseReplica, LoraBaseTeacher
from understudy.teacher.route import TeacherRouter
from understudy.teacher.scoring.model import FrozenModel
from understudy.teacher.vocabulary import Vocabulary
from understudy.trainers.call_batching import BatchSplit, CallQueue
from understudy.trainers.remote_rows.scoring import RemoteScoring
from understudy.types.loss import TeacherHead
from understudy.types.references import ScoreRef
from understudy.types.scores import Signal
from understudy.types.usable_ids import UsableIds

logger = logging.getLogger(__name__)
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
_SEQUENCES_BY_ARRIVAL = 16
"""The most sequences in one scoring request without full determinism. Enough to keep the cost of requests
low, few enough that answers come soon."""
_TOKENS_BY_ARRIVAL = 16_384
"""The most tokens in such a request: as many as a replica's own batch has."""
_SEQUENCES_BY_KEY = 64
"""The sequences in one scoring request under full determinism. A constant, so that scores do not depend on
replica counts."""


@dataclass(frozen=True, slots=True)
class StudentFacts:
    """Facts about the student and its data that a teacher must fit."""

    vocabulary: Vocabulary
    head_rows: int
    """The rows of the student's output head; some may belong to no token."""
    usable: UsableIds | None
    """The token ids of this run: those that the student and all other models have a token for."""
    device: torch.device
    context: int
    """The maximum length of a rollout."""
    weight_bytes: int
    """The size of its weights, for teachers that take the student's weights after each publish."""
    longest_prompt: Callable[[str], Awaitable[int]]
    """Teacher → the tokens of the longest prompt that it scores. Called only if the teacher may not hold the
    longest rollout."""
    mixed: Mapping[str, int] = field(default_factory=dict)
    """Teachers that rows name in a mixture → the most teachers of one of its mixtures."""
    longest_own_prompt: Mapping[str, Callable[[], Awaitable[int]]] = field(default_factory=dict)
    """The same as `longest_prompt` for external teachers that read prompts of their own. Those of replicas
    that this run starts were measured by `check`, which knows their context."""
    pictures: PictureReader | None = None
    """For a student that reads pictures."""
    base: FrozenModel | None = None
    """The student's model before adapters, for teachers with `placement = "trainer"`."""
    aligned: Mapping[str, Side] = field(default_factory=dict)
    """By name: the vocabulary of teachers with another tokenizer."""

    def vocabulary_of(self, teacher: str) -> Vocabulary:
        """The vocabulary that a teacher must have."""
        return self.aligned[teacher].vocabulary if teacher in self.aligned else self.vocabulary

    @property
    def family(self) -> str | None:
        return None if self.pictures is None else self.pictures.processor.family

    @property
    def media(self) -> MediaStore | None:
        return None if self.pictures is None else self.pictures.store


TeacherLauncher = LocalTeachers | VLLMTeachers | LoraBaseTeacher | EngineTeachers


@dataclass(frozen=True, slots=True)
class Teachers:
    """The teachers of a run. Used on the event loop."""

    pools: dict[str, TeacherPool]
    heads: dict[str, TeacherHead] = field(default_factory=dict)
    """Output heads by teacher, if rows carry hidden states. A head is fetched once."""
    launchers: dict[str, TeacherLauncher] = field(default_factory=dict)
    """Launchers by teacher. External teachers have none."""
    tokens: dict[str, str | None] = field(default_factory=dict)
    """The bearer token of each external teacher's servers."""

    @property
    def following(self) -> dict[str, FollowingReplicas]:
        """The replicas of teachers that follow the student, by teacher."""
        found = {name: launcher.following for name, launcher in self.launchers.items()}
        return {name: one for name, one in found.items() if one is not None}

    async def close(self) -> None:
        await asyncio.gather(*(pool.close() for pool in self.pools.values()))
        for replicas in self.following.values():
            await replicas.close()

    async def add(self, teacher: str, url: str | None = None) -> str:
        """Adds a replica to a running run: a new process, or the server at `url`. Returns its name."""
        pool = self._pool(teacher)
        taken, launcher = {int(replica) for replica in pool.replicas}, self.launchers.get(teacher)
        if isinstance(launcher, EngineTeachers):  # replica i sits in engine process i
            name = str(min(set(range(len(taken) + 1)) - taken))
        else:
            name = str(max(taken, default=-1) + 1)
        if url is None and teacher not in self.launchers:
            raise TeacherError(f"teacher {teacher} is external: say where its new replica answers (--url)")
        if url is not None and teacher in self.launchers:
            raise TeacherError(f"teacher {teacher} runs processes of this machine; leave the address out")
        endpoint = None if url is None else Endpoint(url, self.tokens.get(teacher))
        try:
            await pool.add(ReplicaSpec(name, endpoint))
        except BaseException:
            if teacher in self.launchers:
                self.launchers[teacher].forget(name)
            raise
        return name

    async def remove(self, teacher: str, replica: str) -> None:
        """Removes a replica. Its requests are finished, or sent to another replica."""
        await self._pool(teacher).remove(replica)
        if teacher in self.launchers:
            self.launchers[teacher].forget(replica)

    def _pool(self, teacher: str) -> TeacherPool:
        if teacher not in self.pools:
            raise TeacherError(
                f"no teacher {teacher!r} in this run; teachers are {', '.join(self.pools) or 'none'}"
            )
        return self.pools[teacher]


@dataclass(frozen=True, slots=True)
class _Launch:
    """What every teacher of a launch is started with."""

    settings: TeacherSettings
    processes: LocalProcesses
    seats: Seats
    student: StudentFacts
    view: LiveView
    token: str
    """The bearer token of the replicas that this run starts."""
    remote: RemoteScoring | None
    engine: Engine | None

    @property
    def batching(self) -> RequestBatching:
        """How replicas of this run batch requests."""
        return RequestBatching.BY_REQUEST if self.settings.deterministic else RequestBatching.BY_ARRIVAL


async def start_teachers(
    settings: TeacherSettings,
    processes: LocalProcesses,
    seating: Seating,
    student: StudentFacts,
    view: LiveView,
    token: str,
    remote: RemoteScoring | None = None,
    engine: Engine | None = None,
) -> Teachers:
    """Starts all teachers at once and checks them against the student. If one fails, all are stopped.

    With `remote`, workers send the requests for remote rows. `engine`: the student's, for teachers with
    `placement = "engine"`."""
    seats, teachers = Seats(seating, gpu_names()), Teachers({})
    launch = _Launch(settings, processes, seats, student, view, token, remote, engine)
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
    processes, student, batching = launch.processes, launch.student, launch.batching
    if teacher.placement == "trainer":
        assert student.base is not None
        return LoraBaseTeacher(LoraBaseReplica.of(name, teacher, batching), launch.token, student.base)
    if teacher.placement == "engine":
        assert isinstance(launch.engine, HostedEngine)
        return EngineTeachers(processes, name, launch.engine, place)
    if teacher.starts_vllm:
        k = launch.settings.topk
        return VLLMTeachers(processes, name, teacher, batching, launch.token, launch.seats, k, student.family)
    launcher = LocalTeachers(processes, name, teacher, batching, launch.token, launch.seats)
    if teacher.follows_student:
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
    connect = _connect(launch, name, teacher)
    return TeacherPool(name, specs, launcher, options=options, connect=connect, on_event=on_event)


def _connect(launch: _Launch, name: str, teacher: TeacherConfig) -> Connect:
    """What makes the pool's client of a replica: of our own server, or of another project's."""
    student = launch.student
    usable = None if name in student.aligned else student.usable
    server: ExternalServer | None = None
    connect: Connect = partial(connect_native, usable=usable, media=student.media)
    if teacher.placement == "external" or teacher.starts_vllm:
        server = _server(launch, name, teacher, usable)
        # A teacher with another tokenizer has other placeholder ids for pictures.
        pictures = None if name in student.aligned else student.pictures
        connect = server.connect(usable, student.media, pictures)
    return connect if launch.remote is None else launch.remote.connect(connect, server, usable)


def _server(launch: _Launch, name: str, teacher: TeacherConfig, usable: UsableIds | None) -> ExternalServer:
    student = launch.student
    vocabulary = student.vocabulary_of(name)
    ids = student.head_rows if usable is None else min(usable.limit, student.head_rows)
    if name in student.aligned:
        ids = max(vocabulary.ids.values()) + 1
    server = ExternalServer(
        ids,
        vocabulary.fingerprint,
        teacher.model,
        teacher.backend,
        launch.settings.topk,
        aligned=name in student.aligned,
    )
    if teacher.starts_vllm:  # it serves the teacher's name, and one sequence at a time if asked to
        server = msgspec.structs.replace(server, model=name, batching=launch.batching)
    return server


def check_patching(name: str, student: PictureReader | None, manifest: Manifest) -> None:
    """Raises if student and teacher cut the same picture into different tokens."""
    if student is None or manifest.pictures is None:
        return
    if differs := patching_difference(student.processor.patching, manifest.pictures.patching):
        raise TeacherError(
            f"teacher {name} cuts pictures into other tokens than the student ({differs}); ids are sent as they are, so save "
            "both models with the same preprocessor_config.json"
        )


def teacher_tokens(teachers: Mapping[str, TeacherConfig]) -> dict[str, str | None]:
    """The bearer token of each external teacher's servers."""
    external = {name: one for name, one in teachers.items() if one.placement == "external"}
    return {name: token_of(name, one) for name, one in external.items()}


def token_of(name: str, teacher: TeacherConfig) -> str | None:
    token = os.environ.get(teacher.token_env) if teacher.token_env else None
    if teacher.token_env and not token:
        raise ConfigError(
            f"teachers.{name}.token_env = {teacher.token_env!r}: that environment variable is empty; export the token"
        )
    return token


async def _start(teachers: Teachers, name: str, settings: TeacherSettings, student: StudentFacts) -> None:
    """Starts a teacher and checks that it fits the recipe: its signals, its context and its vocabulary."""
    pool, signal = teachers.pools[name], Signal(settings.signal)
    await pool.start()
    manifest = pool.manifest
    signals = [signal]
    if name in student.mixed:
        signals = list(dict.fromkeys([*signals, *needed_signals(signal)]))
    length = await _length(name, settings, student, manifest)
    check_signals(manifest, signals, settings.k, length, student.mixed.get(name, 1))
    check_patching(name, student.pictures, manifest)
    if settings.deterministic and manifest.batching is RequestBatching.BY_ARRIVAL:
        logger.warning(
            "teacher %s batches by arrival: its scores, and so this run, may differ in the last bits from time to time; "
            "serve it with --batching by_request for determinism = 'full'",
            name,
        )
    if manifest.quantization is not None:
        logger.info("teacher %s has weights in %s: %s", name, manifest.dtype, manifest.quantization)
    if settings.teachers[name].starts_vllm:
        return  # it loaded the files that `check` compared
    if manifest.backend != "native":
        logger.warning(
            "teacher %s is served by %s: it shows neither its token→id map nor its weights, so these were not compared (only the files of "
            "its model, where they can be read here); "
            "its signals (%s), largest K (%d), context (%d) and scores of the fixed tokens were",
            name,
            manifest.backend,
            ", ".join(manifest.signals),
            manifest.limits.max_k,
            manifest.limits.max_length,
        )
        return
    teacher = settings.teachers[name]
    launcher = teachers.launchers.get(name)
    endpoint = launcher.endpoints["0"] if launcher else Endpoint(teacher.urls[0], teachers.tokens[name])
    async with ReplicaClient(endpoint.url, endpoint.token, teacher=name) as client:
        expected = student.vocabulary_of(name)
        if manifest.vocab_fingerprint != expected.fingerprint:
            rows = (None if name in student.aligned else student.head_rows, manifest.vocab_size)
            check_vocabulary(expected, await client.vocabulary(), name, rows)
        if signal is Signal.HIDDEN:
            teachers.heads[name] = _head(await client.head(), settings.temperature, student.device)


async def _length(name: str, settings: TeacherSettings, student: StudentFacts, manifest: Manifest) -> int:
    """The length that a teacher must hold: prompt + response + 1. The student's prompts are measured only if
    the teacher's context is not longer than the longest rollout."""
    answer = settings.max_new_tokens + 1
    if settings.teachers[name].reads_own_prompt or name in student.aligned:
        measure = student.longest_own_prompt.get(name)
        return answer + (await measure() if measure else 0)
    holds_all = manifest.limits.max_length > student.context
    return answer + (0 if holds_all else await student.longest_prompt(name))


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


def router_of(settings: TeacherSettings, pools: Mapping[str, TeacherPool]) -> TeacherRouter | None:
    return TeacherRouter(pools, settings.routes, default=settings.default) if pools else None


def teacher_queues(pools: Mapping[str, TeacherPool], deterministic: bool) -> dict[str, CallQueue]:
    """The call queue of each teacher. Under full determinism requests are chunks composed by key. Otherwise
    samples are sent as they come, a few per request, and the replica batches them."""
    limit = _SEQUENCES_BY_KEY if deterministic else _SEQUENCES_BY_ARRIVAL
    return {
        name: CallQueue(
            f"score/{name}",
            pool.score,
            limit,
            BatchSplit(partial(_width, pool), _tokens, _TOKENS_BY_ARRIVAL),
            check=partial(_check_row, pool),
        )
        for name, pool in pools.items()
    }


def _width(pool: TeacherPool) -> int:
    return pool.width


def _check_row(pool: TeacherPool, item: ScoreRef) -> None:
    check_row(pool.manifest, item)


def _tokens(item: ScoreRef) -> int:
    return item.length


def manifests_of(pools: Mapping[str, TeacherPool]) -> dict[str, dict[str, Any]]:
    """Each teacher's manifest and its scores of the fixed tokens, for checkpoints."""
    return {
        name: {**msgspec.to_builtins(pool.manifest), "fixed_scores": pool.fixed_scores}
        for name, pool in pools.items()
    }
