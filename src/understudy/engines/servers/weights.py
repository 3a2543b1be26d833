"""Delivers new weights to servers: by device copy on a shared GPU, by snapshot file, or by broadcast.

    server is                        way
    a vLLM on the trainer's GPU      copy on the device (`gpu_handover.py`)
    on this machine                  snapshot: one safetensors file in a folder, in memory by default
    a remote vLLM that we started    broadcast, as for engine processes (`hosted/weights.py`), to its proxy
                                     (`vllm_proxy.py`), which writes a snapshot on its own machine

The newest weights are kept for servers that are being restarted, even if none was there to take them.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError
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
from understudy.weights.snapshots import Snapshots, memory_for

Post = Callable[[EngineReplica, str, Json], Awaitable[Json]]
Given = TypeVar("Given")


class ServerWeights:
    """Delivers weights to one engine's servers and keeps the newest. Called on the engine's event loop.

    Calls must not overlap, and the caller stops generation first. `report_lost` is called with a server that
    cannot be reached. If it returns True, the owner of the servers restarts that one and calls `catch_up`.
    """

    def __init__(
        self,
        dialect: Dialect,
        post: Post,
        report_lost: Callable[[EngineReplica], bool],
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
        self._report_lost = report_lost
        self._folder: OwnedFolder | None = None
        self._newest: tuple[Path, int] | None = None
        self._live: tuple[Sequence[tuple[str, Tensor]], int] | None = None
        """The trained tensors themselves and their version, if servers copy from them directly."""
        self._address = address
        self._broadcast: Broadcast | None = None
        self._channels: dict[str, HostChannel] = {}
        """Connections to the proxies of remote servers, by replica name."""
        self._sent: int | None = None
        """The version last broadcast, or kept for a broadcast."""
        self._published: int | None = None
        """The version of the last publish that succeeded; None: servers have the weights of their folder."""

    async def bring(
        self,
        replicas: Sequence[EngineReplica],
        version: int,
        tensors: Sequence[tuple[str, Tensor]],
        absent: Sequence[EngineReplica] = (),
    ) -> None:
        """Sends new weights to these servers, to each the fastest way it supports. No tensors: a no-op.

        `absent`: servers that are being restarted; the weights are kept for `catch_up`.
        """
        if not tensors:
            return
        remote = [one for one in replicas if not one.endpoint.shares_memory]
        here = [one for one in replicas if one.endpoint.shares_memory]
        if remote or not all(one.endpoint.shares_memory for one in absent):
            await self._send(remote, version, tensors)
        if here or any(one.endpoint.shares_memory for one in absent):
            await self._bring_here(here, version, tensors)
        self._published = version

    async def _bring_here(
        self, replicas: Sequence[EngineReplica], version: int, tensors: Sequence[tuple[str, Tensor]]
    ) -> None:
        """Sends new weights to servers on this machine; with none, only keeps them."""
        if self._handover is not None:
            handing = (self._unless_gone(one, self._hand_over(one, version, tensors)) for one in replicas)
            taken = await asyncio.gather(*handing)
            replicas = [one for one, done in zip(replicas, taken, strict=True) if done is False]
            self._live, self._newest = (tensors, version), None
            if not replicas:
                return
        snapshot = await self._snapshot(version, tensors)
        await asyncio.gather(
            *(self._unless_gone(one, self._load(one, snapshot, version)) for one in replicas)
        )

    async def catch_up(self, replica: EngineReplica) -> None:
        """Sends the newest weights to a restarted server; raises if they are not those last published."""
        replica.label, version = "", None
        if not replica.endpoint.shares_memory:
            version = await self._send_again(replica)
        else:
            if self._handover is not None:
                self._handover.forget(replica.name)
            if self._newest is not None:
                await self._load(replica, *self._newest)
                version = self._newest[1]
            elif self._live is not None:
                tensors, version = self._live
                if not await self._hand_over(replica, version, tensors):
                    await self._load(replica, await self._snapshot(version, tensors), version)
        if version != self._published:
            raise EngineError(
                f"{replica.name} is back and was given weights of version {version}; expected {self._published}, "
                "the last that was published. It gets no requests; a restart after the next publish mends it"
            )

    async def _send(
        self, replicas: Sequence[EngineReplica], version: int, tensors: Sequence[tuple[str, Tensor]]
    ) -> None:
        """Broadcasts to all remote servers at once."""
        if self._broadcast is None:
            self._broadcast = Broadcast(Snapshots(0), self._address)
        channels = {self._channel(one): one for one in replicas}
        self._sent = version  # before the publish: one that fails may have packed these weights
        lost = await self._broadcast.publish(version, tensors, list(channels), pack=True)
        for channel, problem in lost.items():
            if not self._report_lost(channels[channel]):
                raise UnreachableError(str(problem)) from problem
        await asyncio.gather(
            *(self._renew(one, version) for channel, one in channels.items() if channel not in lost)
        )

    async def _send_again(self, replica: EngineReplica) -> int | None:
        """Sends the newest weights to a restarted remote server; returns their version."""
        old = self._channels.pop(replica.name, None)
        if old is not None:
            await old.close()
        if self._broadcast is not None and self._sent is not None:
            await self._broadcast.give(self._sent, self._channel(replica))
            await self._renew(replica, self._sent)
        return self._sent

    def _channel(self, replica: EngineReplica) -> HostChannel:
        if replica.name not in self._channels:
            self._channels[replica.name] = HostChannel(replica.name, replica.endpoint)
        return self._channels[replica.name]

    async def _hand_over(
        self, replica: EngineReplica, version: int, tensors: Sequence[tuple[str, Tensor]]
    ) -> bool:
        """Tries the device copy; False if the server needs a snapshot."""
        assert self._handover is not None

        async def call(method: str, arguments: list[str]) -> Json:
            return await self._post(replica, "/collective_rpc", {"method": method, "args": arguments})

        if not await self._handover.attach(replica.name, call, tensors):
            return False
        # Concurrently: generation is stopped, so the order on the server does not matter.
        copied = self._handover.copy(replica.name, call, version)
        for outcome in await asyncio.gather(copied, self._renew(replica, version), return_exceptions=True):
            if outcome is not None:
                raise outcome
        return True

    async def _unless_gone(self, replica: EngineReplica, giving: Awaitable[Given]) -> Given | None:
        """None if the server cannot be reached and will be restarted."""
        try:
            return await giving
        except UnreachableError:
            if not self._report_lost(replica):
                raise
            return None

    async def _snapshot(self, version: int, tensors: Sequence[tuple[str, Tensor]]) -> Path:
        """Writes the snapshot and keeps it as the newest."""
        snapshot = await asyncio.to_thread(self._write, version, tensors)
        self._newest = (snapshot, version)
        return snapshot

    def _write(self, version: int, tensors: Sequence[tuple[str, Tensor]]) -> Path:
        if self._dialect.load is None:
            raise EngineError(
                f"a server that speaks {self._dialect.name} cannot take new weights; use vllm or sglang to train"
            )
        named = {name: tensor.detach().to("cpu", copy=False).contiguous() for name, tensor in tensors}
        if self._folder is None:
            size = sum(tensor.nbytes for tensor in named.values())
            # Twice, because a snapshot is removed only after the next one is written.
            parent = self._snapshots or memory_for(2 * size)
            self._folder = OwnedFolder("understudy-weights-", parent, tidy=self._snapshots is None)
        folder = self._folder.path / f"v{version}"
        folder.mkdir(exist_ok=True)
        try:
            save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise EngineError(
                f"weights of version {version} could not be written to {self._folder.path}: {error}"
            ) from error
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
