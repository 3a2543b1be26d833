"""Teachers put on their feet: processes from `cluster`, pools and routing from `teacher`. Only here do the two meet."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch

from understudy.cluster.local import LocalProcesses
from understudy.config import Recipe, TeacherConfig
from understudy.errors import ConfigError
from understudy.observability.live import LiveView
from understudy.teacher.client import ReplicaClient
from understudy.teacher.head_frame import WireHead
from understudy.teacher.integrity import check_signals, check_vocabulary
from understudy.teacher.launch import Endpoint, ReplicaSpec
from understudy.teacher.pool import PoolOptions, TeacherPool
from understudy.teacher.pool_events import EventKind, PoolEvent, log_event
from understudy.teacher.route import TeacherRouter
from understudy.teacher.vocabulary import Vocabulary
from understudy.trainers.gather import Lane
from understudy.trainers.loading import resolve_device
from understudy.trainers.system import System
from understudy.types.loss import TeacherHead
from understudy.types.scores import Signal

_TOLD = (EventKind.PAUSED, EventKind.RESUMED, EventKind.EJECTED, EventKind.RESTARTED, EventKind.READMITTED)
_SCORE_CHUNK = 32
"""Sequences of one scoring request under full determinism: a constant, so that scores do not depend on replica counts."""


class LocalTeachers:
    """Starts and restarts the replicas of one teacher as local processes (a `teacher.pool.Launcher`)."""

    def __init__(
        self, processes: LocalProcesses, name: str, teacher: TeacherConfig, batching: str, token: str
    ) -> None:
        self._processes = processes
        self._name = name
        self._teacher = teacher
        self._batching = batching
        self._token = token
        self.endpoints: dict[str, Endpoint] = {}

    def _process(self, replica: str) -> str:
        return f"teacher-{self._name}-{replica}"

    async def start(self, replica: str) -> Endpoint:
        await self.stop(replica)
        teacher = self._teacher
        port = teacher.ports[int(replica)] if teacher.ports else 0
        arguments = [
            "--model", teacher.model,
            "--name", self._name,
            "--bind", f"127.0.0.1:{port}",
            "--dtype", teacher.dtype,
            "--device", str(resolve_device(teacher.device)),
            "--threads", str(teacher.threads),
            "--batching", self._batching,
            "--max-batch-tokens", str(teacher.max_batch_tokens),
        ]  # fmt: skip
        # The token goes through the environment: command lines are readable by every user of the machine.
        env = {"UNDERSTUDY_TOKEN": self._token, "OMP_NUM_THREADS": str(teacher.threads)}
        child = await self._processes.start(
            self._process(replica), "understudy.teacher.server", arguments, env
        )
        self.endpoints[replica] = Endpoint(child.ready["url"], self._token)
        return self.endpoints[replica]

    async def stop(self, replica: str) -> None:
        await self._processes.stop(self._process(replica))

    def alive(self, replica: str) -> bool:
        child = self._processes.children.get(self._process(replica))
        return child is not None and child.alive


@dataclass(frozen=True, slots=True)
class Teachers:
    pools: dict[str, TeacherPool]
    heads: dict[str, TeacherHead]
    """By teacher, where rows carry hidden states; a head travels once."""

    async def close(self) -> None:
        await asyncio.gather(*(pool.close() for pool in self.pools.values()))


async def start_teachers(
    recipe: Recipe,
    processes: LocalProcesses,
    student: Vocabulary,
    view: LiveView,
    token: str,
    deterministic: bool,
) -> Teachers:
    """Every teacher's pool, started at once and checked against the student; nothing is left running when one fails."""
    batching = "by_request" if deterministic else "by_arrival"
    launchers = {
        name: LocalTeachers(processes, name, teacher, batching, token)
        for name, teacher in recipe.teachers.items()
    }
    pools = {name: _pool(name, teacher, launchers[name], view) for name, teacher in recipe.teachers.items()}
    replicas = sum(len(teacher.urls) or teacher.replicas for teacher in recipe.teachers.values())
    view.phase(f"starting {len(pools)} teacher(s), {replicas} replica process(es)")
    teachers = Teachers(pools, {})
    try:
        async with asyncio.TaskGroup() as tasks:
            for name in pools:
                tasks.create_task(_start(teachers, name, recipe, student, launchers[name]))
    except BaseException:
        await teachers.close()
        raise
    view.phase("")
    return teachers


async def _start(
    teachers: Teachers, name: str, recipe: Recipe, student: Vocabulary, launcher: LocalTeachers
) -> None:
    """Up, and fit for this recipe: it can give the signal, holds a whole rollout, and shares the student's vocabulary."""
    pool = teachers.pools[name]
    await pool.start()
    loss = recipe.loss
    k = loss.topk if loss.signal in ("topk", "at_ids") else 0
    check_signals(pool.manifest, [Signal(loss.signal)], k, recipe.rollout.max_new_tokens + 1)
    endpoint = launcher.endpoints.get("0") or _external_endpoints(name, recipe.teachers[name])[0]
    async with ReplicaClient(endpoint.url, endpoint.token, teacher=name) as client:
        if pool.manifest.vocab_fingerprint != student.fingerprint:
            check_vocabulary(student, await client.vocabulary(), name)
        if loss.signal == "hidden":
            teachers.heads[name] = _head(await client.head(), loss.teacher_temperature)


def _head(wire: WireHead, temperature: float) -> TeacherHead:
    """The teacher's projection; bfloat16 arrives as its bits, because numpy has no bfloat16."""

    def tensor(array: np.ndarray) -> torch.Tensor:
        found = torch.from_numpy(np.array(array))
        return found.view(torch.bfloat16) if found.dtype == torch.uint16 else found

    return TeacherHead(
        weight_VH=tensor(wire.weight_VH),
        bias_V=None if wire.bias_V is None else tensor(wire.bias_V),
        softcap=wire.softcap,
        logit_scale=wire.scale,
        temperature=temperature,
    )


def _pool(name: str, teacher: TeacherConfig, launcher: LocalTeachers, view: LiveView) -> TeacherPool:
    def tell(event: PoolEvent) -> None:
        log_event(event)
        if event.kind in _TOLD:
            view.note(f"teacher {event.teacher}: {event.message}")

    options = PoolOptions(deadline_base=teacher.deadline_seconds)
    if teacher.placement != "external":
        specs = [ReplicaSpec(str(i)) for i in range(teacher.replicas)]
        return TeacherPool(name, specs, launcher, options=options, on_event=tell)
    specs = [ReplicaSpec(str(i), endpoint) for i, endpoint in enumerate(_external_endpoints(name, teacher))]
    return TeacherPool(name, specs, options=options, on_event=tell)


def _external_endpoints(name: str, teacher: TeacherConfig) -> list[Endpoint]:
    token = os.environ.get(teacher.token_env) if teacher.token_env else None
    if teacher.token_env and not token:
        raise ConfigError(
            f"teachers.{name}.token_env = {teacher.token_env!r}: that environment variable is empty; export the token"
        )
    return [Endpoint(url, token) for url in teacher.urls]


def router_of(recipe: Recipe, pools: Mapping[str, TeacherPool]) -> TeacherRouter | None:
    if not pools:
        return None
    keys = {teacher.key: name for name, teacher in recipe.teachers.items() if teacher.key is not None}
    return TeacherRouter(pools, keys if len(pools) > 1 else None, default=recipe.data.default_teacher)


def teacher_lanes(pools: Mapping[str, TeacherPool], deterministic: bool) -> dict[str, Lane]:
    """Full determinism sends chunks composed by key; otherwise each sample goes alone and the replica batches."""
    limit = _SCORE_CHUNK if deterministic else 1
    return {name: Lane(f"score/{name}", pool.score, limit) for name, pool in pools.items()}


def manifests_of(pools: Mapping[str, TeacherPool]) -> dict[str, dict[str, Any]]:
    return {name: msgspec.to_builtins(pool.manifest) for name, pool in pools.items()}


def teacher_metrics(system: System) -> dict[str, float]:
    """Per replica: its share of the tokens its teacher scored; per teacher: latency, retries, queue."""
    return {
        f"perf/{name}": value
        for pool in system.pools.values()
        for name, value in pool.metrics().flat().items()
    }
