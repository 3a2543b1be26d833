"""Delivers new weights to engine processes: by shared memory on this machine, by broadcast to others.

    this machine      one safetensors file in /dev/shm, mapped by all hosts       (`weights/snapshots.py`)
    other machines    buckets to all hosts at once, through a process group       (`weights/broadcast.py`)

    publish ──> all remote hosts in one group ──a member dies──> each remaining host alone ──fails──> lost

So a publish always ends: after two rounds, each with a deadline. A host has a version only once it has
confirmed it. A host that has not gets no requests until it was restarted and has the newest weights.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from understudy.engines.hosted.client import HostChannel, HostLost
from understudy.errors import EngineError
from understudy.weights.broadcast import (
    BUCKET_BYTES,
    GroupBackend,
    GroupOrder,
    Member,
    PackedWeights,
    Rendezvous,
    Stage,
    StreamOrder,
    TransferBroken,
    choose_backend,
    drop,
    gpu_id,
    send,
)
from understudy.weights.orders import WeightsOrder
from understudy.weights.snapshots import Snapshots

logger = logging.getLogger(__name__)

_STALL_S = 20.0
"""How long one bucket, or joining a group, may take before the group counts as broken."""
_CONFIRM_S = 60.0
"""How long a host may take to confirm: after the last bucket it only copies in memory, between two tokens."""


@dataclass(slots=True)
class _Group:
    """A broadcast group, used again while its members stay the same."""

    members: tuple[HostChannel, ...]
    name: str
    backend: GroupBackend = GroupBackend.GLOO
    joined: Any = None


class WeightDelivery:
    """Sends weights to hosts and keeps the newest for hosts that restart.

    `HostedEngine` calls it on its event loop. Calls must not overlap, except with `close`.
    """

    def __init__(
        self,
        snapshots: Snapshots,
        address: str = "127.0.0.1",
        *,
        stall_s: float = _STALL_S,
        bucket_bytes: int = BUCKET_BYTES,
        hosts: str = "engine processes",
    ) -> None:
        """`address`: this machine's address as seen from remote hosts. `hosts`: what the log calls them."""
        self._hosts = hosts
        self._snapshots, self._address = snapshots, address
        self._stall_s, self._bucket_bytes = stall_s, bucket_bytes
        self._rendezvous: Rendezvous | None = None
        self._group: _Group | None = None
        self._groups = 0
        self._file: str | None = None
        self._packed: PackedWeights | None = None
        self._spare: list[Tensor] = []
        """Buffers of earlier buckets that no thread sends from any more."""
        self._sending = False
        """Whether a sending thread may still read the newest buckets."""
        self._device = torch.device("cpu")
        """The device of the published weights."""
        self._stage: Stage | None = None
        self._notes: set[str] = set()
        self._nccl_failed = False

    @property
    def folder(self) -> Path:
        return self._snapshots.folder

    async def publish(
        self,
        version: int,
        tensors: Iterable[tuple[str, Tensor]],
        hosts: Sequence[HostChannel],
        *,
        pack: bool = False,
    ) -> dict[HostChannel, HostLost]:
        """Sends the weights to every host. Returns lost hosts with the reason; raises if a host refuses.

        `pack`: packs them for remote hosts even if none is given, because `give` will send them to one.
        """
        named = list(tensors)
        if not named:
            return await self._tell(hosts, WeightsOrder(version))
        local = [host for host in hosts if host.endpoint.shares_memory]
        remote = [host for host in hosts if not host.endpoint.shares_memory]
        # Replace the newest weights only once the file is complete: a restarted host gets the newest.
        pack = pack or bool(remote)
        file = await asyncio.to_thread(self._snapshots.write, version, named) if local or not pack else None
        if self._packed is not None:
            # The buckets before these are packed into again, unless a thread may still send from them.
            self._spare = [] if self._sending else self._packed.flats
            self._sending = False
        self._file, before = file, self._file
        self._device = named[0][1].device
        self._packed = PackedWeights(named, self._bucket_bytes, self._spare) if pack else None
        at_once = await asyncio.gather(
            self._tell(local, WeightsOrder(version, self._file)),
            self._broadcast(version, remote),
            return_exceptions=True,
        )
        if self._packed is not None:
            await asyncio.to_thread(self._packed.complete)
        if before is not None or self._file is not None:
            self._snapshots.forget_all_but(self._file or "")
        lost: dict[HostChannel, HostLost] = {}
        for outcome in at_once:
            if isinstance(outcome, BaseException):
                raise outcome
            lost |= outcome
        return lost

    async def give(self, version: int, host: HostChannel) -> None:
        """Sends the newest weights to one host as version `version`; raises unless the host confirms."""
        if self._file is None and self._packed is None:
            await host.order("/v1/weights", WeightsOrder(version))
        elif host.endpoint.shares_memory:
            if self._file is None and self._packed is not None:
                self._file = await asyncio.to_thread(self._snapshots.write, version, self._packed.tensors())
            await host.order("/v1/weights", WeightsOrder(version, self._file))
        else:
            if self._packed is None and self._file is not None:
                named = await asyncio.to_thread(self._snapshots.read, self._file)
                self._packed = PackedWeights(named, self._bucket_bytes)
            lost = await self._send_alone(version, host)
            if lost is not None:
                raise lost

    # --- hosts on other machines

    async def _broadcast(self, version: int, remote: Sequence[HostChannel]) -> dict[HostChannel, HostLost]:
        """Sends to all remote hosts at once; then to each host alone that missed it because another died."""
        if not remote:
            return {}
        if self._group is None or self._group.members != tuple(remote):
            self._group = _Group(tuple(remote), self._next_name(), self._backend_for(remote))
        began, backend = time.monotonic(), self._group.backend
        missed = await self._stream(version, self._group)
        logger.info(
            "weights of version %d: %d of %d remote %s have them, after %.3f s (%s)",
            version,
            len(remote) - len(missed),
            len(remote),
            self._hosts,
            time.monotonic() - began,
            backend.value,
        )
        if (
            missed
            and backend is GroupBackend.NCCL
            and not any(isinstance(p, HostLost) for p in missed.values())
        ):
            self._nccl_failed = True
            self._note(
                f"NCCL did not carry the weights ({next(iter(missed.values()))}); gloo does from now on"
            )
        if missed:
            self._group = None
        lost = {host: problem for host, problem in missed.items() if isinstance(problem, HostLost)}
        again = [host for host in missed if host not in lost]
        outcomes = await asyncio.gather(*(self._send_alone(version, host) for host in again))
        return lost | {host: one for host, one in zip(again, outcomes, strict=True) if one is not None}

    def _backend_for(self, remote: Sequence[HostChannel]) -> GroupBackend:
        """Chooses by what every member reports of itself. Logs once why a choice is not the expected one."""
        members = [
            Member("the trainer", gpu_id(self._device)),
            *(Member(host.name, host.endpoint.gpu) for host in remote),
        ]
        choice = choose_backend(members)
        if choice.note is not None:
            self._note(choice.note)
        return GroupBackend.GLOO if self._nccl_failed else choice.backend

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.add(text)
            logger.warning("%s", text)

    async def _send_alone(self, version: int, host: HostChannel) -> HostLost | None:
        """Sends to one host in a group of two, which no other member can break; by gloo, without a GPU."""
        missed = await self._stream(version, _Group((host,), self._next_name()))
        return HostLost(f"{host.name} did not get the weights: {missed[host]}") if missed else None

    async def _stream(self, version: int, group: _Group) -> dict[HostChannel, EngineError]:
        """Sends the packed weights through a group. Returns the hosts that did not confirm, with the reason.

        Raises a host's own refusal.
        """
        assert self._packed is not None
        if self._rendezvous is None:
            self._rendezvous = Rendezvous(self._address)
        orders = [self._group_order(group, rank) for rank in range(len(group.members) + 1)]
        staged = group.backend is GroupBackend.NCCL
        streams = [
            StreamOrder(order, self._packed.bucket_bytes, self._packed.notes, staged) for order in orders[1:]
        ]
        telling = [
            asyncio.ensure_future(host.order("/v1/weights", WeightsOrder(version, stream=one)))
            for host, one in zip(group.members, streams, strict=True)
        ]
        sending = asyncio.ensure_future(asyncio.to_thread(self._send, group, orders[0], self._packed))
        try:
            # One failure breaks the group for all members: then only wait until their deadlines have passed.
            waiting: list[asyncio.Future[None]] = [sending, *telling]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
            broken = any(one.done() and one.exception() for one in waiting)
            await asyncio.wait(telling, timeout=2 * self._stall_s if broken else _CONFIRM_S)
            answers = zip(group.members, telling, strict=True)
            return {host: problem for host, answer in answers if (problem := _problem(answer)) is not None}
        finally:
            if not sending.done():  # the thread ends at its deadline and reads the buckets until then
                self._sending = True
            # Marks its error as seen, or asyncio would log it: each host's own answer tells what went wrong.
            sending.add_done_callback(lambda done: done.cancelled() or done.exception())
            for answer in telling:
                answer.cancel()
            await asyncio.gather(*telling, return_exceptions=True)

    def _send(self, group: _Group, order: GroupOrder, packed: PackedWeights) -> None:
        assert self._rendezvous is not None
        problem = ""
        try:
            group.joined = group.joined or self._rendezvous.join(order)
            send(group.joined, packed, self._staged(group))
        except (RuntimeError, TransferBroken) as error:
            problem = str(error)
        # Outside the handler, so that no traceback holds a reference to the group: other members detect its end.
        if problem:
            drop(group.joined, order)
            group.joined = None
            raise TransferBroken(problem)

    def _staged(self, group: _Group) -> Stage | None:
        if group.backend is not GroupBackend.NCCL:
            return None
        if self._stage is None or self._stage.device != self._device:
            self._stage = Stage(self._device)
        return self._stage

    def _group_order(self, group: _Group, rank: int) -> GroupOrder:
        assert self._rendezvous is not None
        size = len(group.members) + 1
        return GroupOrder(
            self._rendezvous.host,
            self._rendezvous.port,
            group.name,
            rank,
            size,
            self._stall_s,
            group.backend.value,
        )

    def _next_name(self) -> str:
        self._groups += 1
        return f"weights-{self._groups}"

    # --- hosts on this machine

    async def _tell(self, hosts: Sequence[HostChannel], order: WeightsOrder) -> dict[HostChannel, HostLost]:
        answers = await asyncio.gather(
            *(host.order("/v1/weights", order) for host in hosts), return_exceptions=True
        )
        lost = {}
        for host, answer in zip(hosts, answers, strict=True):
            if isinstance(answer, HostLost):
                lost[host] = answer
            elif answer is not None:
                raise answer
        return lost

    def close(self) -> None:
        self._group = self._rendezvous = None
        self._snapshots.close()


def _problem(answer: asyncio.Future[None]) -> EngineError | None:
    """Why a host does not have the weights, or None; raises a host's own refusal."""
    if not answer.done():
        return TransferBroken("it did not confirm them in time")
    problem = answer.exception()
    if problem is None or isinstance(problem, HostLost | TransferBroken):
        return problem
    raise problem
