"""Broadcast of weights to remote engines in flat buckets through a process group; code of both ends.

    trainer (rank 0)   pack bucket 2 │ send bucket 1        pack bucket 3 │ send bucket 2 …
                                     │ broadcast (gloo, or NCCL between GPUs: `choose_backend`)
    engine (rank 1 …)                └──> own buffers ──> complete, verified ──> copied in between two tokens

A bucket is a byte buffer: whole tensors one after another, each at a multiple of 16, then the sum of the
bucket's 8-byte words. The order lists the tensors (`StreamOrder.tensors`), so both ends compute the same
buckets. The trainer keeps the packed buckets: a restarted engine gets the same bytes. An engine copies
weights in only after all buckets have arrived. So if a transfer breaks, it continues under its old weights.

With NCCL, buckets pass through a few staging buffers in each member's GPU memory (`Stage`). The complete
set is kept in host memory with either backend, so no GPU holds the weights twice.

The group is built by hand over its own store, because the trainer's process may already be in torch's
default group with its ranks. Every operation has a deadline. A member that dies breaks the group for all
within that deadline.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from understudy.errors import EngineError


class GroupBackend(StrEnum):
    """The library that carries a broadcast."""

    GLOO = "gloo"
    NCCL = "nccl"


@dataclass(frozen=True, slots=True)
class Member:
    """One process of a group, as it describes itself."""

    name: str
    gpu: str | None = None
    """The id of the GPU that holds its weights, the same in every process; None: host memory, or no NCCL."""


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """The chosen backend, and a note if a user might expect another."""

    backend: GroupBackend
    note: str | None = None
    """Why it is not NCCL, if a user might expect NCCL."""


def choose_backend(members: Sequence[Member]) -> BackendChoice:
    on_gpus = [member for member in members if member.gpu is not None]
    if not on_gpus:
        return BackendChoice(GroupBackend.GLOO)
    without = [member.name for member in members if member.gpu is None]
    if without:
        return BackendChoice(
            GroupBackend.GLOO,
            f"{', '.join(without)} of {len(members)} members have no GPU that NCCL can use, so weights travel through host memory",
        )
    owners: dict[str, str] = {}
    for member in on_gpus:
        assert member.gpu is not None
        if member.gpu in owners:
            return BackendChoice(
                GroupBackend.GLOO,
                f"{owners[member.gpu]} and {member.name} share GPU {member.gpu}, and NCCL wants one for each member, so weights "
                "travel through host memory",
            )
        owners[member.gpu] = member.name
    return BackendChoice(GroupBackend.NCCL)


def gpu_id(device: torch.device | str) -> str | None:
    """The id of the GPU that holds a process's weights; None if there is none, or NCCL is missing."""
    found = torch.device(device)
    if found.type != "cuda" or not torch.cuda.is_available() or not dist.is_nccl_available():
        return None
    return str(torch.cuda.get_device_properties(found).uuid)


class TensorNote(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Name, type and shape of one tensor of a broadcast."""

    name: str
    dtype: str
    shape: list[int]


class GroupOrder(msgspec.Struct, forbid_unknown_fields=True):
    """How a member joins a broadcast group; rank 0 is the trainer."""

    host: str
    port: int
    name: str
    """A member that already joined a group of this name uses it again."""
    rank: int
    size: int
    stall_s: float
    """How long one bucket, or joining the group, may take."""
    backend: str = "gloo"
    """A `GroupBackend`."""


class StreamOrder(msgspec.Struct, forbid_unknown_fields=True):
    """Announces a broadcast to an engine: the group, and the tensors in order (see `plan`)."""

    group: GroupOrder
    bucket_bytes: int
    tensors: list[TensorNote]
    staged: bool = False
    """Whether buckets arrive in memory of the engine's device instead of host memory."""


BUCKET_BYTES = 64 << 20
_ALIGN = 16
_SUM_BYTES = 8
_IN_FLIGHT = 2
"""Broadcasts in flight while the next bucket is packed."""
_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
_DTYPES = {str(one).removeprefix("torch."): one for one in (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)}  # fmt: skip


class TransferBroken(EngineError):
    """The weights did not arrive completely; the engine still has its old ones."""


@dataclass(frozen=True, slots=True)
class TensorSpan:
    """A tensor's place in its bucket, in bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.stop].view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Which tensors share one buffer, and its size."""

    pieces: tuple[TensorSpan, ...]
    size: int
    """Bytes without the checksum; a multiple of 16."""


def notes_of(named: Sequence[tuple[str, Tensor]]) -> list[TensorNote]:
    return [
        TensorNote(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
        for name, tensor in named
    ]


def plan(notes: Sequence[TensorNote], bucket_bytes: int) -> list[Bucket]:
    """Puts tensors in order into buckets of at most `bucket_bytes`; a larger tensor gets its own bucket."""
    buckets: list[Bucket] = []
    pieces: list[TensorSpan] = []
    at = 0
    for note in notes:
        if note.dtype not in _DTYPES or min(note.shape, default=0) < 0:
            raise TransferBroken(f"{note.name} is {note.dtype} of shape {note.shape}, which is not sent")
        dtype, count = _DTYPES[note.dtype], 1
        for length in note.shape:
            count *= length
        size = count * dtype.itemsize
        if pieces and at + size > bucket_bytes:
            buckets.append(Bucket(tuple(pieces), at))
            pieces, at = [], 0
        pieces.append(TensorSpan(note.name, dtype, tuple(note.shape), at, at + size))
        at += -(-size // _ALIGN) * _ALIGN
    return [*buckets, Bucket(tuple(pieces), at)] if pieces else buckets


def buffers_for(buckets: Sequence[Bucket], before: Sequence[Tensor] = ()) -> list[Tensor]:
    """Buffers for each bucket and its checksum; reuses `before` if the sizes agree."""
    sizes = [bucket.size + _SUM_BYTES for bucket in buckets]
    if sizes == [len(flat) for flat in before]:
        return list(before)
    return [torch.zeros(size, dtype=torch.uint8) for size in sizes]


def _sum(flat: Tensor) -> Tensor:
    return flat[:-_SUM_BYTES].view(torch.int64).sum()


class Stage:
    """Staging buffers in device memory: one for each broadcast in flight, and one for the next bucket."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._memory: list[Tensor] = []

    def buffer(self, index: int, size: int) -> Tensor:
        """The buffer for bucket `index`; the bucket that used it before must have been sent."""
        place = index % (_IN_FLIGHT + 1)
        while len(self._memory) <= place:
            self._memory.append(torch.empty(0, dtype=torch.uint8, device=self.device))
        if len(self._memory[place]) < size:
            self._memory[place] = torch.empty(size, dtype=torch.uint8, device=self.device)
        return self._memory[place][:size]


class PackedWeights:
    """One version's weights as buckets, each packed at first use. Thread-safe."""

    def __init__(
        self,
        named: Sequence[tuple[str, Tensor]],
        bucket_bytes: int = BUCKET_BYTES,
        before: Sequence[Tensor] = (),
    ) -> None:
        self.notes = notes_of(named)
        self.bucket_bytes = bucket_bytes
        self.buckets = plan(self.notes, bucket_bytes)
        self.flats = buffers_for(self.buckets, before)
        self._unpacked: dict[str, Tensor] = dict(named)
        self._packing = threading.Lock()

    def flat(self, index: int) -> Tensor:
        with self._packing:
            pieces, flat = self.buckets[index].pieces, self.flats[index]
            if pieces[0].name in self._unpacked:
                for piece in pieces:
                    piece.of(flat).copy_(self._unpacked.pop(piece.name))
                flat[-_SUM_BYTES:].view(torch.int64).copy_(_sum(flat))
            return flat

    def staged(self, index: int, stage: Stage) -> Tensor:
        """The same bucket in device memory. A new one is packed there: weights leave the device once."""
        with self._packing:
            pieces, flat = self.buckets[index].pieces, self.flats[index]
            staged = stage.buffer(index, len(flat))
            if pieces[0].name not in self._unpacked:
                return staged.copy_(flat)
            staged.zero_()  # the padding between tensors is part of the checksum
            for piece in pieces:
                piece.of(staged).copy_(self._unpacked.pop(piece.name))
            staged[-_SUM_BYTES:].view(torch.int64).copy_(_sum(staged))
            flat.copy_(staged)
            return staged

    def complete(self) -> None:
        """Packs all remaining buckets; afterwards the tensors may change."""
        for index in range(len(self.buckets)):
            self.flat(index)

    def tensors(self) -> list[tuple[str, Tensor]]:
        self.complete()
        return [
            (piece.name, piece.of(flat))
            for bucket, flat in zip(self.buckets, self.flats, strict=True)
            for piece in bucket.pieces
        ]


class Rendezvous:
    """The trainer's TCP store for joining groups. It listens on the given address only."""

    def __init__(self, address: str) -> None:
        self.host = address
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as listening:
            listening.bind((address, 0))
            listening.listen(128)
            self.port: int = listening.getsockname()[1]
            self._store = dist.TCPStore(
                address,
                self.port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listening.detach(),
            )

    def join(self, order: GroupOrder) -> Any:
        return _join(order, self.host)


def _join(order: GroupOrder, address: str) -> Any:
    """Joins a group of the order's backend; gloo listens on this address only.

    Raises `RuntimeError` if the other members do not join in time. Each group has its own connection to the
    store, because a waiting call blocks its connection for all other users.
    """
    timeout = timedelta(seconds=order.stall_s)
    store = dist.TCPStore(order.host, order.port, is_master=False, wait_for_workers=False, timeout=timeout)
    if _is_nccl(order):
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timeout
        with _nccl_waits_raise():
            return nccl(dist.PrefixStore(order.name, store), order.rank, order.size, options)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_device(hostname=address)]
    return gloo(dist.PrefixStore(order.name, store), order.rank, order.size, options)


def _is_nccl(order: GroupOrder) -> bool:
    return GroupBackend(order.backend) is GroupBackend.NCCL


def drop(group: Any, order: GroupOrder | None) -> None:
    """Aborts a broken NCCL group, whose destructor would wait for its members otherwise."""
    if group is not None and order is not None and _is_nccl(order):
        with contextlib.suppress(RuntimeError):
            group.abort()


@contextlib.contextmanager
def _nccl_waits_raise() -> Iterator[None]:
    """Makes `wait` of an NCCL group created inside block up to the group's deadline and raise.

    Otherwise torch's watchdog ends the whole process when a member is lost: the trainer would die with an
    engine.
    """
    before = os.environ.get(_BLOCKING_WAIT)
    os.environ[_BLOCKING_WAIT] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_BLOCKING_WAIT]
        else:
            os.environ[_BLOCKING_WAIT] = before


def _in_turn(group: Any, flats: Iterable[Tensor]) -> Iterator[Tensor]:
    """Broadcasts one after another, a few in flight at once; yields each when it is done.

    After a failure, waits for the broadcasts still in flight, each up to its deadline. Then no broadcast
    writes into memory that is used again, and the group can be dropped without waiting inside torch.
    """
    in_flight: deque[tuple[Any, Tensor]] = deque()
    try:
        for flat in flats:
            options = dist.BroadcastOptions()
            options.rootRank = options.rootTensor = 0
            in_flight.append((group.broadcast([flat], options), flat))
            if len(in_flight) > _IN_FLIGHT:
                in_flight[0][0].wait()
                yield in_flight.popleft()[1]
        while in_flight:
            in_flight[0][0].wait()
            yield in_flight.popleft()[1]
    finally:
        for work, _ in in_flight:
            with contextlib.suppress(RuntimeError):
                work.wait()


def send(group: Any, packed: PackedWeights, stage: Stage | None = None) -> None:
    """Sends every bucket to every member and packs the next one meanwhile; with NCCL through `stage`."""
    numbers = range(len(packed.buckets))
    flats = map(packed.flat, numbers) if stage is None else (packed.staged(n, stage) for n in numbers)
    try:
        deque(_in_turn(group, flats), maxlen=0)
    except RuntimeError as error:
        raise TransferBroken(_first_line(error)) from error


class Receiver:
    """An engine's end of a broadcast: group, and buffers for one set of weights. Calls must not overlap."""

    def __init__(self, address: str, device: torch.device | str = "cpu") -> None:
        self._address = address
        self._stage = Stage(device)
        self._order: GroupOrder | None = None
        self._group: Any = None
        self._flats: list[Tensor] = []

    def receive(self, order: StreamOrder) -> list[tuple[str, Tensor]]:
        """Receives and verifies all tensors of a broadcast; they are valid until the next call.

        On failure it leaves the group and raises `TransferBroken`.
        """
        buckets = plan(order.tensors, order.bucket_bytes)
        self._flats = buffers_for(buckets, self._flats)
        buffers = (self._stage.buffer(n, len(flat)) for n, flat in enumerate(self._flats))
        try:
            group = self._joined(order.group)
            arriving = _in_turn(group, buffers if order.staged else self._flats)
            for number, flat in enumerate(arriving):
                if not torch.equal(flat[-_SUM_BYTES:].view(torch.int64)[0], _sum(flat)):
                    raise TransferBroken(f"bucket {number} of {len(buckets)} came damaged")
                if order.staged:
                    self._flats[number].copy_(flat)
        except (RuntimeError, TransferBroken) as error:
            self.leave()
            raise TransferBroken(f"weights did not arrive whole: {_first_line(error)}") from error
        return [
            (piece.name, piece.of(flat))
            for bucket, flat in zip(buckets, self._flats, strict=True)
            for piece in bucket.pieces
        ]

    def _joined(self, order: GroupOrder) -> Any:
        if self._order is None or self._order.name != order.name:
            self.leave()
            self._group, self._order = _join(order, self._address), order
        return self._group

    def leave(self) -> None:
        drop(self._group, self._order)
        self._group = self._order = None


def _first_line(error: BaseException) -> str:
    """The first line of a torch error, without the source location in front of it."""
    text = str(error).strip().split("\n", 1)[0]
    return text.split("] ", 1)[1] if text.startswith("[") and "] " in text else text
