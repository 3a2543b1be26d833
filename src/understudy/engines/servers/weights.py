"""Delivers new weights to servers: by device copy on a shared GPU, by snapshot file, or by broadcast.

    server is                        way
    a vLLM on the trainer's GPU      copy on the device (`gpu_handover.py`)
    on this machine                  snapshot: one safetensors file in a folder, in memory by default
    a remote vLLM that we started    broadcast, as for engine processes (`hosted/weights.py`), to its proxy
                                     (`vllm_proxy.py`), which writes a snapshot on its own machine

The newest snapshot is kept, because a restarted server needs it.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from understudy.engines.hosted.client import HostChannel
from understudy.engines.hosted.weights import WeightDelivery as Broadcast
from understudy.engines.replicas import EngineReplica
from understudy.engines.servers.continuation import RefusedError, UnreachableError
from understudy.engines.servers.dialects import Dialect, Json
from understudy.engines.servers.gpu_handover import GpuHandover
from understudy.errors import EngineError
from understudy.observability.owned_folder import OwnedFolder
from understudy.weights.snapshots import Snapshots

Post = Callable[[EngineReplica, str, Json], Awaitable[Json]]


class ServerWeights:
    """Delivers weights to one engine's servers and keeps the newest. Called on the engine's event loop.

    Calls must not overlap, and the caller stops generation first. `give_up` is called with a server that
    cannot be reached. If it returns True, the owner of the servers restarts that one and calls `catch_up`.
    """

    def __init__(
        self,
        dialect: Dialect,
        post: Post,
        give_up: Callable[[EngineReplica], bool],
        snapshots: Path | None,
        handover: GpuHandover | None,
        address: str = "127.0.0.1",
        pictures: bool = False,
    ) -> None:
        """`address`: this machine's address as seen from remote servers. `pictures`: servers read some."""
        self._forgotten = [
            one for one in (dialect.forget, dialect.forget_pictures if pictures else None) if one is not None
        ]
        self._dialect, self._post, self._snapshots, self._handover = dialect, post, snapshots, handover
        self._give_up = give_up
        self._folder: OwnedFolder | None = None
        self._newest: tuple[Path, int] | None = None
        self._live: tuple[Sequence[tuple[str, Tensor]], int] | None = None
        """The trained tensors themselves and their version, if servers copy from them directly."""
        self._address = address
        self._broadcast: Broadcast | None = None
        self._channels: dict[str, HostChannel] = {}
        """Connections to the proxies of remote servers, by replica name."""
        self._sent: int | None = None
        """The version last broadcast."""

    async def bring(
        self, replicas: Sequence[EngineReplica], version: int, tensors: Sequence[tuple[str, Tensor]]
    ) -> None:
        """Sends new weights to these servers, to each the fastest way it supports. No tensors: a no-op."""
        if not tensors:
            return
        remote = [one for one in replicas if not one.endpoint.shares_memory]
        replicas = [one for one in replicas if one.endpoint.shares_memory]
        if remote:
            await self._send(remote, version, tensors)
        if replicas and self._handover is not None:
            taken = await asyncio.gather(*(self._hand_over(one, version, tensors) for one in replicas))
            replicas = [one for one, done in zip(replicas, taken, strict=True) if not done]
            self._live, self._newest = (tensors, version), None
        if replicas:
            snapshot = await asyncio.to_thread(self._write, version, tensors)
            self._newest = (snapshot, version)
            await asyncio.gather(*(self._load_if_there(one, snapshot, version) for one in replicas))

    async def catch_up(self, replica: EngineReplica) -> None:
        """Sends the newest weights to a restarted server."""
        replica.label = ""
        if not replica.endpoint.shares_memory:
            await self._send_again(replica)
            return
        if self._handover is not None:
            self._handover.forget(replica.name)
        if self._newest is not None:
            await self._load(replica, *self._newest)
        elif self._live is not None:
            tensors, version = self._live
            await self.bring([replica], version, tensors)

    async def _send(
        self, replicas: Sequence[EngineReplica], version: int, tensors: Sequence[tuple[str, Tensor]]
    ) -> None:
        """Broadcasts to all remote servers at once."""
        if self._broadcast is None:
            self._broadcast = Broadcast(Snapshots(0), self._address)
        channels = {self._channel(one): one for one in replicas}
        lost = await self._broadcast.publish(version, tensors, list(channels))
        self._sent = version
        for channel, problem in lost.items():
            if not self._give_up(channels[channel]):
                raise UnreachableError(str(problem)) from problem
        await asyncio.gather(
            *(self._renew(one, version) for channel, one in channels.items() if channel not in lost)
        )

    async def _send_again(self, replica: EngineReplica) -> None:
        """Sends the newest weights to a restarted remote server."""
        old = self._channels.pop(replica.name, None)
        if old is not None:
            await old.close()
        if self._broadcast is not None and self._sent is not None:
            await self._broadcast.give(self._sent, self._channel(replica))
            await self._renew(replica, self._sent)

    def _channel(self, replica: EngineReplica) -> HostChannel:
        if replica.name not in self._channels:
            self._channels[replica.name] = HostChannel(replica.name, replica.endpoint)
        return self._channels[replica.name]

    async def _hand_over(
        self, replica: EngineReplica, version: int, tensors: Sequence[tuple[str, Tensor]]
    ) -> bool:
        """Tries the device copy. False if the server needs a snapshot; True if it is done or given up."""
        assert self._handover is not None

        async def call(method: str, arguments: list[str]) -> Json:
            return await self._post(replica, "/collective_rpc", {"method": method, "args": arguments})

        try:
            if not await self._handover.attach(replica.name, call, tensors):
                return False
            # Concurrently: generation is stopped, so the order on the server does not matter.
            copied = self._handover.copy(replica.name, call, version)
            for outcome in await asyncio.gather(
                copied, self._renew(replica, version), return_exceptions=True
            ):
                if outcome is not None:
                    raise outcome
        except UnreachableError:
            if not self._give_up(replica):
                raise
        return True

    async def _load_if_there(self, replica: EngineReplica, snapshot: Path, version: int) -> None:
        try:
            await self._load(replica, snapshot, version)
        except UnreachableError:
            if not self._give_up(replica):
                raise

    def _write(self, version: int, tensors: Sequence[tuple[str, Tensor]]) -> Path:
        if self._dialect.load is None:
            raise EngineError(
                f"a server that speaks {self._dialect.name} cannot take new weights; use vllm or sglang to train"
            )
        named = {name: tensor.detach().to("cpu", copy=False).contiguous() for name, tensor in tensors}
        if self._folder is None:
            memory = Path("/dev/shm")
            parent = self._snapshots or (memory if memory.is_dir() else None)
            self._folder = OwnedFolder("understudy-weights-", parent, tidy=self._snapshots is None)
        folder = self._folder.path / f"v{version}"
        folder.mkdir(exist_ok=True)
        save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
        for old in self._folder.path.glob("v*"):
            if old != folder:
                shutil.rmtree(old)
        return folder / "model.safetensors"

    async def _load(self, replica: EngineReplica, snapshot: Path, version: int) -> None:
        assert self._dialect.load is not None
        reply = await self._post(replica, *self._dialect.load(str(snapshot), version))
        if not self._dialect.loaded(reply, version):
            raise EngineError(f"{replica.name} did not load weights version {version}: {str(reply)[:300]}")
        await self._renew(replica, version)

    async def _renew(self, replica: EngineReplica, version: int) -> None:
        """Drops what the server has cached by older weights and sets its name for the new ones.

        Features of pictures are dropped even if the vision part is the same: vLLM's worker drops them when it
        loads weights, and vLLM's scheduler has to know."""
        dropped = (self._post(replica, *one) for one in self._forgotten)
        await asyncio.gather(*dropped, self._label(replica, version))

    async def _label(self, replica: EngineReplica, version: int) -> None:
        if self._dialect.label is None or replica.label is None:
            return
        try:
            await self._post(replica, *self._dialect.label(version))
            replica.label = str(version)
        except RefusedError:
            replica.label = None  # an older server without this route: do not ask again

    async def close(self) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))
        if self._folder is not None:
            self._folder.close()
        if self._broadcast is not None:
            self._broadcast.close()
