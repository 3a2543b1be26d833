"""Teachers that follow the student: which of its weights they hold, and how these reach their replicas.

    publish v ──> engines take v ──> no row is being scored ──> replicas take their version ──> scoring goes on

| `version` | weights after publish v                   | after a resume                          |
|-----------|-------------------------------------------|-----------------------------------------|
| start     | those the run began with; not here        | loaded from the same files              |
| live      | v                                         | those of the checkpoint                 |
| ema       | the running average after v               | that of the checkpoint                  |
| N         | N publishes before v, the first ones: v 0 | from `teacher_weights/` of the run      |

Rows are scored between two publishes, so a row has one version, whichever replicas score it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from understudy.config import TeacherConfig, TrainerConfig
from understudy.engines.hosted.client import HostChannel, HostLost
from understudy.engines.hosted.weights import WeightDelivery
from understudy.errors import CheckpointError
from understudy.policy.checkpoints.durable import sync_directory, sync_file
from understudy.policy.policy import Policy
from understudy.policy.ranks.follow import LeadingPolicy
from understudy.serving.endpoint import Endpoint
from understudy.teacher.pool.options import SupervisorOptions
from understudy.teacher.pool.pool import TeacherPool
from understudy.trainers.pacing.publish_gate import PublishGate
from understudy.weights.snapshots import Snapshots

_TAKE_SECONDS = 300.0
"""How long a replica may take to load weights that are in memory."""
_SILENCE_S = SupervisorOptions().probe_deadline
"""How long a replica that takes weights may leave /health unanswered: as long as the pool's probe waits."""
_BEAT_S = 1.0
FOLDER = "teacher_weights"
"""The folder in the run directory with earlier weights, for teachers that lag behind."""


class _Channel(HostChannel):
    """The connection to one replica. An order has a deadline, because a replica does nothing else meanwhile.

    The pool does not probe a replica that takes weights, so /health shows whether it hangs."""

    async def order(self, path: str, order: msgspec.Struct | None = None) -> None:
        body = b"" if order is None else msgspec.json.encode(order)
        asking = asyncio.ensure_future(self.ask(path, body, timeout_s=_TAKE_SECONDS))
        hanging = asyncio.ensure_future(self._until_it_hangs())
        try:
            await asyncio.wait([asking, hanging], return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise HostLost(f"{self.name} does not answer /health, so it hangs or is gone")
            asking.result()
        finally:
            asking.cancel()
            hanging.cancel()
            await asyncio.gather(asking, hanging, return_exceptions=True)

    async def _until_it_hangs(self) -> None:
        await asyncio.sleep(_BEAT_S)
        while await self.answers(_SILENCE_S):
            await asyncio.sleep(_BEAT_S)


class FollowingReplicas:
    """The replicas of one teacher, which take the student's weights. Used on the event loop."""

    def __init__(self, teacher: str, weight_bytes: int, address: str) -> None:
        self._teacher = teacher
        self._delivery = WeightDelivery(
            Snapshots(weight_bytes), address, hosts=f"replicas of teacher {teacher}"
        )
        self._channels: dict[str, HostChannel] = {}
        self._version: int | None = None
        self._sending = asyncio.Lock()

    @property
    def folder(self) -> Path:
        return self._delivery.folder

    async def started(self, replica: str, endpoint: Endpoint) -> None:
        """Gives a replica that has just started the newest weights, if there are any."""
        async with self._sending:
            if before := self._channels.pop(replica, None):
                await before.close()
            channel = self._channels[replica] = _Channel(
                f"teacher {self._teacher}, replica {replica}", endpoint
            )
            if self._version is not None:
                await self._delivery.give(self._version, channel)

    async def stopped(self, replica: str) -> None:
        """Weights that are published before the replica starts again are not sent to it."""
        if channel := self._channels.pop(replica, None):
            await channel.close()

    async def send(
        self, version: int, tensors: Sequence[tuple[str, Tensor]], replicas: Sequence[str]
    ) -> dict[str, str]:
        """Returns the replicas that did not take the weights, each with the reason."""
        async with self._sending:
            self._version = version
            names = {self._channels[name]: name for name in replicas if name in self._channels}
            lost = await self._delivery.publish(version, tensors, list(names))
        return {names[channel]: str(reason) for channel, reason in lost.items()}

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()
        self._delivery.close()


class EarlierWeights:
    """Published weights by version, in the run directory, so that a resumed run finds them."""

    def __init__(self, folder: Path, in_use: Callable[[], Sequence[int]]) -> None:
        """`in_use`: the steps of checkpoints that a resume may load, those being saved included."""
        self._folder = folder
        self._in_use = in_use

    def save(self, version: int, tensors: Sequence[tuple[str, Tensor]], publishes: int, every: int) -> None:
        """Also removes versions that neither this run nor a resume needs: those more than `publishes` publishes (one
        every `every` steps) before this one and before the last publish of each checkpoint."""
        self._folder.mkdir(exist_ok=True)
        path, temporary = self._path(version), self._folder / f".v{version}.tmp"
        save_file({name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors}, temporary)
        sync_file(temporary)
        temporary.replace(path)
        sync_directory(self._folder)
        newest = [version, *self._in_use()]
        for old in self._folder.glob("v*.safetensors"):
            number = int(old.stem[1:])
            if not any(0 <= step // every * every - number <= publishes * every for step in newest):
                old.unlink(missing_ok=True)

    def load(self, version: int) -> list[tuple[str, Tensor]]:
        path = self._path(version)
        if not path.is_file():
            raise CheckpointError(
                f"{path} is missing: a teacher of this run lags behind the student and needs it; restore the file, or start a "
                "new run"
            )
        try:
            return list(load_file(path).items())
        except SafetensorError as error:
            raise CheckpointError(
                f"{path} is damaged ({error}): a teacher of this run lags behind the student and needs it; restore the file, or start "
                "a new run"
            ) from error

    def _path(self, version: int) -> Path:
        return self._folder / f"v{version}.safetensors"


@dataclass(frozen=True)
class SelfTeachers:
    """Publishes the student's weights to the teachers that follow it (a `WeightPublisher`)."""

    versions: Mapping[str, str | int]
    """By teacher: `live`, `ema` or how many publishes it lags behind."""
    pools: Mapping[str, TeacherPool]
    replicas: Mapping[str, FollowingReplicas]
    source: Policy | LeadingPolicy
    earlier: EarlierWeights
    updates_per_publish: int
    gate: PublishGate
    """Rows enter it while they are scored. It is closed while teachers take weights."""

    @property
    def version(self) -> int:
        return max(self.pools[name].manifest.version for name in self.versions)

    async def publish(self, version: int) -> None:
        """Returns when every teacher has its weights. Rows wait meanwhile."""
        lags = [lag for lag in self.versions.values() if isinstance(lag, int)]
        if lags and version % self.updates_per_publish == 0:
            weights = await asyncio.to_thread(self.source.named_weights)
            await asyncio.to_thread(self.earlier.save, version, weights, max(lags), self.updates_per_publish)
        await self.gate.close()
        for name, kind in self.versions.items():
            await self._change(name, kind, version)
        # Not after an error or a cancellation: the run ends, and the rows that wait are scored by the next launch.
        self.gate.open()

    async def _change(self, name: str, kind: str | int, version: int) -> None:
        if isinstance(kind, int):
            publish = version // self.updates_per_publish
            version = max(0, publish - kind) * self.updates_per_publish
            if version == self.pools[name].manifest.version:
                return
            tensors = await asyncio.to_thread(self.earlier.load, version)
        else:
            read = self.source.averaged_weights if kind == "ema" else self.source.named_weights
            tensors = list(await asyncio.to_thread(read))

        async def deliver(replicas: Sequence[str]) -> Mapping[str, str]:
            return await self.replicas[name].send(version, tensors, replicas)

        await self.pools[name].change_version(version, deliver)


def self_teachers_of(
    teachers: Mapping[str, TeacherConfig],
    trainer: TrainerConfig,
    replicas: Mapping[str, FollowingReplicas],
    pools: Mapping[str, TeacherPool],
    policy: Policy | LeadingPolicy,
    run: Path,
    in_use: Callable[[], Sequence[int]],
) -> SelfTeachers | None:
    """None if no teacher follows the student. `replicas`: of those that do. `in_use`: versions that a resume may need."""
    if not replicas:
        return None
    return SelfTeachers(
        {name: teachers[name].version or "start" for name in replicas},
        {name: pools[name] for name in replicas},
        replicas,
        policy,
        EarlierWeights(run / FOLDER, in_use),
        trainer.sync_every if trainer.mode == "fully_async" else 1,
        PublishGate(),
    )
