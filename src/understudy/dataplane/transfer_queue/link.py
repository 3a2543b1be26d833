"""A client of TransferQueue, which holds columns of rows, by key, in the memory of a Ray cluster.

    link = QueueLink.start(units=2)              in the process that owns the queue; Ray is connected
    link = QueueLink.connect(link.address)       in any other process of the cluster; it needs no Ray
    await link.put("train", keys, {"tokens": [tensor, …]})
    await link.get("train", keys, ("tokens",))

Array columns are stored as plain jagged tensors, so other TransferQueue clients can read them
(`tq.kv_batch_get`). A cell that is not an array is stored as one of our frames, in uint8, a dtype no array
column has.

TransferQueue's own client is not used for `put` and `get`: around each call it sets torch's number of threads
for the whole process and then "restores" the number it saw when it was imported, and sums depend on that
number. Its storage manager, one level below, does not touch it. All calls run on the link's own event loop
and thread, so serialisation never blocks the caller's loop. Nothing here polls or waits for rows: claims are
decided by our ledger.

TransferQueue's wire format is partly pickle and has no authentication: its ports belong inside the cluster
(docs/cluster.md).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import torch
import transfer_queue
from tensordict import TensorDict
from transfer_queue.client import AsyncTransferQueueClient
from transfer_queue.storage.bootstrap import simple_storage_bootstrap
from transfer_queue.utils.enum_utils import Role
from transfer_queue.utils.zmq_utils import ZMQServerInfo

from understudy.dataplane.frame import decode
from understudy.dataplane.transfer_queue.write_ids import Marks, by_name
from understudy.errors import DataPlaneError
from understudy.types.jagged import Jagged

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
_UNMARKED: Marks = {}
FRAME_DTYPE = torch.uint8
_IO_THREADS = 2
_END_SECONDS = 5.0
"""How long cancelled calls may take to end; one of them may be serialising."""


@dataclass(frozen=True, slots=True)
class QueueAddress:
    """Where a queue's processes listen; plain data that can be passed to a child process."""

    controller: Mapping[str, Any]
    units: tuple[Mapping[str, Any], ...]

    def dump(self) -> str:
        return json.dumps({"controller": dict(self.controller), "units": [dict(unit) for unit in self.units]})

    @staticmethod
    def load(text: str) -> QueueAddress:
        address = json.loads(text)
        return QueueAddress(address["controller"], tuple(address["units"]))


class QueueLink:
    """One client connection. Its coroutines may be awaited on any event loop; the work runs on the link's
    thread."""

    def __init__(self, address: QueueAddress, *, owner: bool, prefix: str = "") -> None:
        """`prefix` separates the partitions of several runs on one queue."""
        self.address = address
        self._owner = owner
        self._prefix = prefix
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="transfer-queue", daemon=True)
        self._thread.start()
        self._calls: set[Future[Any]] = set()
        self._lock = threading.Lock()
        """Held by `close` while it lists the open calls, and by each new call: none starts after the list is
        taken."""
        self._client = AsyncTransferQueueClient(
            f"understudy-{os.getpid()}-{id(self):x}", _info(address.controller), zmq_io_threads=_IO_THREADS
        )
        units = {unit["id"]: _info(unit) for unit in address.units}
        self._client.initialize_storage_manager("SimpleStorage", {"zmq_info": units})
        self._closed = False

    @classmethod
    def start(cls, units: int, *, prefix: str = "", timeout: float = 60.0) -> QueueLink:
        """Start a queue on the Ray cluster this process is connected to, or join the one that runs there.

        The controller and each storage unit take a CPU. If the cluster has none left they would wait silently
        for ever, so this raises after `timeout` seconds.
        """
        wish = {
            "controller": {"polling_mode": True},
            # Units are placed round-robin; a machine without CPUs (often the head) could never hold one.
            "backend": {"SimpleStorage": {"num_data_storage_units": units, "required_node_resource": "CPU"}},
        }
        answer: list[Any] = []
        """Whether this link owns the queue, or the error; empty until `init` returns."""

        def begin() -> None:
            try:
                with _units_where_there_is_room():
                    # `init` returns its argument if it joined a queue that runs already: then this link is not its owner.
                    owner = transfer_queue.init(wish) is not wish
                answer.append(owner)
            except BaseException as error:
                answer.append(error)

        thread = threading.Thread(target=begin, name="transfer-queue-start", daemon=True)
        thread.start()
        thread.join(timeout)
        if not answer:
            raise DataPlaneError(
                f"TransferQueue did not start within {timeout:.0f} s: its controller and {units} storage units take a CPU "
                "each; give the cluster more CPUs, or lower dataplane.storage_units"
            )
        if isinstance(answer[0], BaseException):
            raise DataPlaneError(f"TransferQueue did not start: {answer[0]}") from answer[0]
        client = transfer_queue.get_client()
        address = QueueAddress(
            _plain(client._controller),
            tuple(_plain(unit) for unit in client.storage_manager.get_zmq_server_info().values()),
        )
        return cls(address, owner=answer[0], prefix=prefix)

    @classmethod
    def connect(cls, address: QueueAddress, *, prefix: str = "") -> QueueLink:
        return cls(address, owner=False, prefix=prefix)

    def partition_id(self, partition: str) -> str:
        """TransferQueue's name for one of our partitions."""
        return self._prefix + partition

    def partition_of(self, partition_id: str) -> str:
        if not partition_id.startswith(self._prefix):
            raise DataPlaneError(
                f"partition {partition_id!r} of TransferQueue is not this run's ({self._prefix}…)"
            )
        return partition_id.removeprefix(self._prefix)

    async def put(
        self, partition: str, keys: Sequence[str], columns: Mapping[str, Sequence[torch.Tensor]]
    ) -> None:
        """Write columns; every column has one tensor per key, all of one dtype and width."""

        async def work() -> None:
            names = self.partition_id(partition)
            meta = await self._client.async_kv_retrieve_meta(list(keys), names, create=True)
            if meta.size != len(keys):
                raise DataPlaneError(f"TransferQueue made room for {meta.size} of {len(keys)} rows")
            nested = {name: _nest(cells) for name, cells in columns.items()}
            await self._client.storage_manager.put_data(TensorDict(nested, batch_size=[len(keys)]), meta)

        await self._run(work())

    async def get(
        self, partition: str, keys: Sequence[str], names: Sequence[str], marks: Marks = _UNMARKED
    ) -> dict[str, Jagged | list[Any]] | None:
        """Columns of these rows, in this order; None when the queue lacks a row or a column."""
        parts = [self._fetched(partition, own, columns) for own, columns in by_name(keys, names, marks)]
        found: dict[str, Jagged | list[Any] | None] = {}
        for columns in await self._run(_all_of(parts)):
            found |= columns
        if any(found.get(name) is None for name in names):
            return None
        return {name: found[name] for name in names}  # type: ignore[misc]

    async def _fetched(
        self, partition: str, keys: Sequence[str], names: Sequence[str]
    ) -> dict[str, Jagged | list[Any] | None]:
        meta = await self._client.async_kv_retrieve_meta(
            list(keys), self.partition_id(partition), create=False
        )
        # TransferQueue silently leaves out unknown keys.
        if meta.size != len(keys) or not set(names) <= set(meta.field_names):
            return {}
        try:
            found = await self._client.storage_manager.get_data(meta.select_fields(list(names)))
        except transfer_queue.StorageKeyNotFoundError:
            return {}
        return {name: _column(found.get(name)) for name in names}

    async def clear(self, partition: str, keys: Sequence[str]) -> None:
        """Remove rows from the queue; unknown rows are not an error."""

        async def work() -> None:
            meta = await self._client.async_kv_retrieve_meta(
                list(keys), self.partition_id(partition), create=False
            )
            if meta.size:
                await self._client.async_clear_samples(meta)

        await self._run(work())

    async def keys(self, partition: str) -> list[str]:
        """The keys of all rows of which the queue holds any column."""
        names = self.partition_id(partition)
        return list((await self._run(self._client.async_kv_list(names))).get(names, {}))

    async def keys_of(self, global_indexes: Sequence[int], partition_id: str) -> tuple[str, ...]:
        """The keys of rows that a columnar `BatchMeta` names by number."""
        return tuple(await self._run(self._client.async_kv_retrieve_keys(list(global_indexes), partition_id)))

    async def columnar(self, partition: str, keys: Sequence[str]) -> transfer_queue.BatchMeta:
        """TransferQueue's own columnar meta of these rows, in its current state."""
        return await self._run(
            self._client.async_kv_retrieve_meta(list(keys), self.partition_id(partition), create=False)
        )

    async def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        with self._lock:
            if self._closed:
                work.close()
                raise DataPlaneError("the link to TransferQueue is closed")
            call = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._calls.add(call)
        try:
            return await asyncio.wrap_future(call)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._closed or (task is not None and task.cancelling()):
                raise
            # `close` cancelled the call; the caller's own task was not cancelled.
            raise DataPlaneError(
                "the link to TransferQueue was closed while this call waited for an answer; close it after its last user"
            ) from None
        finally:
            self._calls.discard(call)

    def close(self) -> None:
        """Calls still in progress raise `DataPlaneError`. A link that started the queue also stops it."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            calls = list(self._calls)
        for call in calls:
            call.cancel()
        # TransferQueue's client may only be closed when no call is in progress: its sockets belong to the
        # loop's thread.
        if self._ended_loop():
            self._client.close()
        else:
            logger.warning(
                "a call to TransferQueue did not end within %.0f s: its sockets stay open", _END_SECONDS
            )
        if self._owner:
            try:
                transfer_queue.close()
            except Exception as error:  # its machines may be gone
                logger.warning("TransferQueue did not end in order: %s", error)

    def _ended_loop(self) -> bool:
        """Waits for cancelled calls to end, then stops the loop; False if the loop does not respond."""
        # `call_soon_threadsafe`, because the callback may run on this thread while the loop sleeps.
        asyncio.run_coroutine_threadsafe(_last_call(), self._loop).add_done_callback(
            lambda _: self._loop.call_soon_threadsafe(self._loop.stop)
        )
        self._thread.join(2 * _END_SECONDS)
        if self._thread.is_alive():
            return False
        self._loop.close()
        return True


async def _last_call() -> None:
    """Cancel all other tasks of this loop and wait until they end, at most `_END_SECONDS`."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=_END_SECONDS)


@contextmanager
def _units_where_there_is_room() -> Iterator[None]:
    """Makes TransferQueue's placement of storage units soft. It pins each unit to a machine, round-robin, and
    waits for ever if ranks or teachers occupy that machine; with a soft preference the unit goes to another
    one."""
    pinned_strategies = simple_storage_bootstrap.get_node_round_robin_scheduling_strategies

    def soft_strategies(*arguments: Any, **options: Any) -> list[Any]:
        return [
            type(one)(one.node_id, soft=True, _spill_on_unavailable=True)
            for one in pinned_strategies(*arguments, **options)
        ]

    simple_storage_bootstrap.get_node_round_robin_scheduling_strategies = soft_strategies
    try:
        yield
    finally:
        simple_storage_bootstrap.get_node_round_robin_scheduling_strategies = pinned_strategies


async def _all_of(parts: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """A coroutine, which `QueueLink._run` needs; `gather` must be called on the loop that runs it."""
    return await asyncio.gather(*parts)


def _plain(info: ZMQServerInfo) -> dict[str, Any]:
    return {"role": info.role.value, "id": info.id, "ip": info.ip, "ports": dict(info.ports)}


def _info(server: Mapping[str, Any]) -> ZMQServerInfo:
    return ZMQServerInfo(Role(server["role"]), server["id"], server["ip"], dict(server["ports"]))


def _nest(cells: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(list(cells), layout=torch.jagged)


def _column(found: Any) -> Jagged | list[Any] | None:
    """A column as our plane returns it; None for mixed dtypes or widths, for which the ledger's copy gives
    the error."""
    if not isinstance(found, torch.Tensor) or not found.is_nested or found.layout != torch.jagged:
        return None
    nested: Any = found
    offsets = nested.offsets().to(torch.int64)
    if found.dtype == FRAME_DTYPE:
        body = nested.values().numpy().tobytes()
        bounds = offsets.tolist()
        return [decode(body[start:end]) for start, end in pairwise(bounds)]
    return Jagged(nested.values(), offsets)
