"""Starts the teachers of a recipe: connects the processes of `cluster` with the pools of `teacher`.

recipe ─> seats ─> replicas start ─> each is checked    ─> fits this recipe?              ─> router, lanes
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
from understudy.teacher.clients.discover import Backend, connect_external
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
from understudy.teacher.replica.in_process import BaseReplica, BaseTeacher
from understudy.teacher.route import TeacherRouter
from understudy.teacher.scoring.model import FrozenModel
from understudy.teacher.vocabulary import Vocabulary
from understudy.trainers.call_batching import BatchSplit, CallQueue
from understudy.trainers.remote_rows.messages import External
from understudy.trainers.remote_rows.scoring import RemoteScoring
from understudy.types.loss import TeacherHead
from understudy.types.references import ScoreRef
from understudy.types.scores import Signal
from understudy.types.usable_ids import UsableIds

logger = logging.getLogger(__name__)
_TOLD = (
    EventKind.PAUSED,
    EventKind.RESUMED,
    EventKind.EJECTED,
    EventKind.RESTARTED,
    EventKind.READMITTED,
    EventKind.ADDED,
    EventKind.REMOVED,
)


_SCORE_TOGETHER = 16
"""The most sequences in one scoring request without full determinism. Enough to keep the cost of requests
low, few enough that answers come soon."""
_TOGETHER_TOKENS = 16_384
"""The most tokens in such a request: as many as a replica's own batch has."""
_SCORE_CHUNK = 64
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
    """The size of its weights, which teachers that follow it take."""
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


TeacherLauncher = LocalTeachers | VLLMTeachers | BaseTeacher | EngineTeachers


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

    With `remote`, the requests of remote rows are sent by workers. `engine`: where a teacher sits in its processes."""
    batching = RequestBatching.BY_REQUEST if settings.deterministic else RequestBatching.BY_ARRIVAL
    seats, teachers = Seats(seating, gpu_names()), Teachers({})
    for name, teacher in settings.teachers.items():
        if teacher.placement == "external":
            teachers.tokens[name] = token_of(name, teacher)
        elif teacher.placement == "trainer":
            assert student.base is not None
            teachers.launchers[name] = BaseTeacher(
                BaseReplica.of(name, teacher, batching), token, student.base
            )
        elif teacher.placement == "engine":
            assert isinstance(engine, HostedEngine)
            place = sum(isinstance(one, EngineTeachers) for one in teachers.launchers.values())
            teachers.launchers[name] = EngineTeachers(processes, name, engine, place)
        elif teacher.starts_vllm:
            teachers.launchers[name] = VLLMTeachers(
                processes, name, teacher, batching, token, seats, settings.teachers_choose, student.family
            )
        else:
            launcher = LocalTeachers(processes, name, teacher, batching, token, seats)
            if teacher.follows_student:
                launcher.following = FollowingReplicas(name, student.weight_bytes, processes.address)
            teachers.launchers[name] = launcher
        teachers.pools[name] = _pool(name, teacher, teachers, student, view, remote, settings, batching)
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


def _replicas(teacher: TeacherConfig, launcher: TeacherLauncher | None) -> int:
    return launcher.replicas if isinstance(launcher, EngineTeachers) else teacher.replicas


def _pool(
    name: str,
    teacher: TeacherConfig,
    teachers: Teachers,
    student: StudentFacts,
    view: LiveView,
    remote: RemoteScoring | None,
    settings: TeacherSettings,
    batching: RequestBatching,
) -> TeacherPool:
    def tell(event: PoolEvent) -> None:
        log_event(event)
        if event.kind in _TOLD:
            view.note(f"teacher {event.teacher}: {event.message}")

    options = PoolOptions(
        deadline_base=teacher.deadline_seconds,
        hedge_after=teacher.hedge_after_seconds,
        cache_bytes=teacher.cache_bytes,
        # Processes of this run are given up by `cluster.restarts.teacher`.
        outage_most=teacher.outage_seconds if teacher.placement == "external" else None,
        supervisor=SupervisorOptions(health=HealthRules(restarts=Restarts(most=settings.restarts))),
    )
    usable = None if name in student.aligned else student.usable
    launcher = teachers.launchers.get(name)
    if launcher is None:
        endpoints = [Endpoint(url, teachers.tokens[name]) for url in teacher.urls]
        specs = [ReplicaSpec(str(i), endpoint) for i, endpoint in enumerate(endpoints)]
    else:
        specs = [ReplicaSpec(str(i)) for i in range(_replicas(teacher, launcher))]
    if launcher is not None and not teacher.starts_vllm:
        native: Connect = partial(connect_native, usable=usable, media=student.media)
        if remote is not None:
            native = remote.connect(native, None, usable)
        return TeacherPool(name, specs, launcher, options=options, connect=native, on_event=tell)
    own = student.vocabulary_of(name)
    ids = student.head_rows if usable is None else min(usable.limit, student.head_rows)
    if name in student.aligned:
        ids = max(own.ids.values()) + 1
    told = External(
        ids,
        own.fingerprint,
        teacher.model,
        teacher.backend,
        settings.teachers_choose,
        aligned=name in student.aligned,
    )
    if teacher.starts_vllm:  # it serves the teacher's name, and one sequence at a time if asked to
        told = msgspec.structs.replace(told, model=name, batching=batching)
    # Of a teacher with another tokenizer, other ids stand for pictures.
    pictures = None if name in student.aligned else student.pictures
    connect = external_of(told, usable, student.media, pictures)
    if remote is not None:
        connect = remote.connect(connect, told, usable)
    return TeacherPool(name, specs, launcher, options=options, connect=connect, on_event=tell)


def external_of(
    told: External,
    usable: UsableIds | None,
    media: MediaStore | None = None,
    pictures: PictureReader | None = None,
) -> Connect:
    return connect_external(
        told.vocab_size,
        told.vocab_fingerprint,
        told.model,
        Backend(told.backend),
        usable=usable,
        k=told.k,
        media=media,
        batching=told.batching,
        pictures=pictures,
        aligned=told.aligned,
    )


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
        own = student.longest_own_prompt.get(name)
        return answer + (await own() if own else 0)
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
    """The call lanes of the teachers. Under full determinism requests are chunks composed by key. Otherwise
    samples are sent as they come, a few per request, and the replica batches them."""
    limit = _SCORE_CHUNK if deterministic else _SCORE_TOGETHER
    return {
        name: CallQueue(
            f"score/{name}",
            pool.score,
            limit,
            BatchSplit(partial(_width, pool), _tokens, _TOGETHER_TOKENS),
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
