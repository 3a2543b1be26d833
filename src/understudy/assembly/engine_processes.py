"""Starts engine processes: connects the launcher of `cluster` with the client of `engines`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch

from understudy.assembly.processes.scoring_engine import EngineBase
from understudy.engines.hosted.engine import HostedEngine
from understudy.engines.hosted.processes import HOST_MODULE, HostProcesses
from understudy.engines.hosted.weights import WeightDelivery
from understudy.engines.launcher import HostLauncher
from understudy.engines.local.kv_pool import KVFormat
from understudy.engines.local.scheduler import Batching
from understudy.nn.pretrained import AUTO
from understudy.planning.resolved import EngineSettings, ScoredBase
from understudy.serving.supervisor import Restarts
from understudy.teacher.manifest import RequestBatching
from understudy.teacher.replica.in_process import LoraBaseReplica
from understudy.trainers.models import LoadedModel
from understudy.weights.snapshots import Snapshots

SCORING_MODULE = "understudy.assembly.processes.scoring_engine"


@dataclass(frozen=True, slots=True)
class HostSettings:
    """The settings of every engine process."""

    model: str
    """The student's folder. Published weights replace those loaded from it."""
    dtype: str
    device: str
    threads: int
    max_batch: int
    max_length: int
    pad_id: int
    batching: Batching
    """Composed: a batch goes to one process as a whole, and results equal those of the in-process engine with
    as many threads, to the bit. Continuous: requests are merged as they arrive and spread by outstanding
    tokens."""
    deterministic: bool
    kv_format: KVFormat = KVFormat.MODEL
    recompute_kv: bool = True
    """The storage format of keys and values."""
    trust_remote_code: bool = False
    revision: str | None = None
    attention: str = AUTO
    """The attention implementation of transformers, as in training."""
    media: str = ""
    """The folder of the run's pictures, for a vision-language student."""
    base: EngineBase | None = None
    """The teachers that score in every process with the student's base."""

    @property
    def module(self) -> str:
        return HOST_MODULE if self.base is None else SCORING_MODULE

    def arguments(self, weights: str) -> list[str]:
        arguments = [
            "--model",
            self.model,
            "--dtype",
            self.dtype,
            "--device",
            self.device,
            "--weights",
            weights,
        ]
        arguments += ["--threads", str(self.threads), "--max-batch", str(self.max_batch)]
        arguments += ["--max-length", str(self.max_length), "--pad-id", str(self.pad_id)]
        arguments += ["--kv-cache", self.kv_format.value]
        arguments += [] if self.recompute_kv else ["--keep-kv"]
        # On a remote machine the launcher replaces 127.0.0.1 by that machine's own address.
        arguments += ["--batching", self.batching.value, "--bind", "127.0.0.1:0"]
        arguments += ["--deterministic"] if self.deterministic else []
        arguments += ["--trust-remote-code"] if self.trust_remote_code else []
        arguments += ["--attention", self.attention] if self.attention != AUTO else []
        arguments += ["--media", self.media] if self.media else []
        arguments += [] if self.base is None else ["--base", msgspec.json.encode(self.base).decode()]
        return arguments + (["--revision", self.revision] if self.revision else [])


async def start_hosts(
    launcher: HostLauncher,
    settings: HostSettings,
    env: Sequence[Mapping[str, str]],
    *,
    weight_bytes: int,
    restarts: Restarts | None = None,
    notify: Callable[[str], None] | None = None,
) -> HostedEngine:
    """Starts one engine process per entry of `env` (its environment), all at once. Returns the engine that
    uses them.

    `weight_bytes`: the size of one set of weights. Weights are published through shared memory if two sets
    fit.
    """
    snapshots = await asyncio.to_thread(Snapshots, weight_bytes)
    threads = {"OMP_NUM_THREADS": str(settings.threads)}
    arguments = settings.arguments(str(snapshots.folder))
    hosts = HostProcesses(launcher, arguments, [{**threads, **one} for one in env], settings.module)
    starting = [asyncio.ensure_future(hosts.restart(name)) for name in hosts.names]
    try:
        endpoints = await asyncio.gather(*starting)
    except BaseException:
        for task in starting:
            task.cancel()
        await asyncio.gather(*starting, return_exceptions=True)
        await asyncio.gather(*(hosts.stop(name) for name in hosts.names))
        snapshots.close()
        raise
    delivery = WeightDelivery(snapshots, launcher.address)
    return HostedEngine(
        endpoints, hosts, delivery, batching=settings.batching, restarts=restarts, notify=notify
    )


async def hosts_of(
    settings: EngineSettings,
    student: LoadedModel,
    launcher: HostLauncher,
    devices: Sequence[str],
    *,
    max_length: int,
    notify: Callable[[str], None] | None = None,
) -> HostedEngine:
    """The engine processes of `rollout.processes`, on `devices` or the student's device."""
    rollout, deterministic = settings.rollout, settings.deterministic
    host = HostSettings(
        model=settings.student.model,
        dtype=settings.student.dtype,
        device="cuda" if devices else str(student.device),
        threads=settings.threads or torch.get_num_threads(),
        max_batch=rollout.max_batch,
        max_length=max_length,
        pad_id=student.pad_id,
        batching=Batching.COMPOSED if deterministic else Batching.CONTINUOUS,
        deterministic=deterministic,
        kv_format=KVFormat(rollout.kv_cache),
        recompute_kv=rollout.recompute_kv,
        trust_remote_code=settings.student.trust_remote_code,
        revision=settings.student.revision,
        attention=settings.student.attention,
        media=str(student.pictures.store.folder) if student.pictures is not None else "",
        base=None if (base := settings.scored_base) is None else _scoring(base, deterministic),
    )
    env: list[dict[str, str]] = [{"CUDA_VISIBLE_DEVICES": one} for one in devices]
    size = sum(tensor.numel() * tensor.element_size() for tensor in student.model.parameters())
    return await start_hosts(
        launcher,
        host,
        env or [{}] * rollout.processes,
        weight_bytes=size,
        restarts=Restarts(most=settings.restarts),
        notify=notify,
    )


def _scoring(base: ScoredBase, deterministic: bool) -> EngineBase:
    batching = RequestBatching.BY_REQUEST if deterministic else RequestBatching.BY_ARRIVAL
    replicas = [LoraBaseReplica.of(name, teacher, batching) for name, teacher in base.teachers.items()]
    return EngineBase(replicas, base.targets, base.freeze_vision)
