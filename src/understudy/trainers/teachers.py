"""Teachers put on their feet: processes from `cluster`, pools and routing from `teacher`. Only here do the two meet."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any

import msgspec

from understudy.cluster.local import LocalProcesses
from understudy.config import Recipe, TeacherConfig
from understudy.errors import ConfigError
from understudy.observability.live import LiveView
from understudy.teacher.pool import Endpoint, PoolOptions, TeacherPool
from understudy.teacher.route import TeacherRouter
from understudy.teacher.vocabulary import Vocabulary
from understudy.trainers.gather import Lane
from understudy.trainers.system import System

_SCORE_CHUNK = 32
"""Sequences of one scoring request under full determinism: a constant, so that scores do not depend on replica counts."""


class LocalTeachers:
    """Starts and restarts the replicas of one teacher as local processes (a `teacher.pool.Launcher`)."""

    def __init__(self, processes: LocalProcesses, name: str, teacher: TeacherConfig, batching: str, token: str) -> None:
        self._processes = processes
        self._name = name
        self._teacher = teacher
        self._batching = batching
        self._token = token

    def _process(self, replica: str) -> str:
        return f"teacher-{replica.replace('/', '-')}"

    async def start(self, replica: str) -> Endpoint:
        await self.stop(replica)
        index = int(replica.rpartition("/")[2])
        teacher = self._teacher
        port = teacher.ports[index] if teacher.ports else 0
        arguments = [
            "--model", teacher.model,
            "--name", self._name,
            "--bind", f"127.0.0.1:{port}",
            "--dtype", teacher.dtype,
            "--device", _device(teacher.device),
            "--threads", str(teacher.threads),
            "--batching", self._batching,
            "--max-batch-tokens", str(teacher.max_batch_tokens),
        ]  # fmt: skip
        # The token goes through the environment: command lines are readable by every user of the machine.
        env = {"UNDERSTUDY_TOKEN": self._token, "OMP_NUM_THREADS": str(teacher.threads)}
        child = await self._processes.start(self._process(replica), "understudy.teacher.server", arguments, env)
        return Endpoint(child.ready["url"], self._token)

    async def stop(self, replica: str) -> None:
        await self._processes.stop(self._process(replica))

    def alive(self, replica: str) -> bool:
        child = self._processes.children.get(self._process(replica))
        return child is not None and child.alive


async def start_teachers(
    recipe: Recipe, processes: LocalProcesses, vocabulary: Vocabulary, view: LiveView, token: str, deterministic: bool
) -> dict[str, TeacherPool]:
    """Every teacher's pool, started at once and checked against the student; nothing is left running when one fails."""
    pools: dict[str, TeacherPool] = {}
    batching = "by_request" if deterministic else "by_arrival"
    for name, teacher in recipe.teachers.items():
        pools[name] = _pool(name, teacher, LocalTeachers(processes, name, teacher, batching, token), view)
    replicas = sum(len(teacher.urls) or teacher.replicas for teacher in recipe.teachers.values())
    view.phase(f"starting {len(pools)} teacher(s), {replicas} replica process(es)")
    await asyncio.gather(*(pool.start(vocabulary) for pool in pools.values()))
    view.phase("")
    return pools


def _pool(name: str, teacher: TeacherConfig, launcher: LocalTeachers, view: LiveView) -> TeacherPool:
    options = PoolOptions(deadline_seconds=teacher.deadline_seconds, max_restarts=teacher.restarts)
    if teacher.placement == "external":
        token = os.environ.get(teacher.token_env) if teacher.token_env else None
        if teacher.token_env and not token:
            raise ConfigError(f"teachers.{name}.token_env = {teacher.token_env!r}: that environment variable is empty; export the token")
        endpoints = {f"{name}/{i}": Endpoint(url, token) for i, url in enumerate(teacher.urls)}
        return TeacherPool(name, endpoints=endpoints, options=options, say=view.note)
    replicas = [f"{name}/{i}" for i in range(teacher.replicas)]
    return TeacherPool(name, replicas, launcher=launcher, options=options, say=view.note)


def router_of(recipe: Recipe) -> TeacherRouter | None:
    if not recipe.teachers:
        return None
    keys = {teacher.key: name for name, teacher in recipe.teachers.items() if teacher.key is not None}
    return TeacherRouter(list(recipe.teachers), keys, default=recipe.data.default_teacher, column=recipe.data.teacher_key)


def teacher_lanes(pools: Mapping[str, TeacherPool], deterministic: bool) -> dict[str, Lane]:
    """Full determinism sends chunks composed by key; otherwise each sample goes alone and the replica batches."""
    limit = _SCORE_CHUNK if deterministic else 1
    return {name: Lane(f"score/{name}", pool.score, limit) for name, pool in pools.items()}


def manifests_of(pools: Mapping[str, TeacherPool]) -> dict[str, dict[str, Any]]:
    return {name: msgspec.to_builtins(pool.manifest) for name, pool in pools.items()}


def teacher_metrics(system: System) -> dict[str, float]:
    """Per replica: its share of the tokens its teacher scored; per teacher: latency, retries, queue."""
    metrics: dict[str, float] = {}
    for pool in system.pools.values():
        metrics |= {f"perf/teacher/{name}": value for name, value in pool.metrics().items()}
    return metrics


def _device(device: str) -> str:
    from understudy.trainers.loading import resolve_device  # noqa: PLC0415

    return str(resolve_device(device))
