"""Ordered, batched uploads to TransferQueue. Uploads are copies; losing them loses no row.

    put, put, put ──> [ one batch ] ──> TransferQueue
    clear, clear  ──> [ next one  ]     one batch at a time, so writes and clears of a row keep their order

A single put costs four messages; puts that arrive while one is in progress share the next batch. Everything
the queue holds is also in the run directory. If the queue is lost (a node with a storage unit died), the
`QueueUploads` logs a warning, stops using the queue, and rows are read from the run directory from then on.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from understudy.dataplane.frame import FIRST_ARRAY, decode
from understudy.dataplane.transfer_queue.link import FRAME_DTYPE, QueueLink
from understudy.dataplane.transfer_queue.write_ids import Marks
from understudy.types.jagged import Jagged

logger = logging.getLogger(__name__)

TIMEOUT_S = 60.0
_MOST_BYTES = 256 * 2**20
"""Limit of one upload, unless a single put is larger."""
Signature = tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]


@dataclass(slots=True)
class _Put:
    partition: str
    rows: Mapping[str, Mapping[str, bytes]]
    size: int
    answer: asyncio.Future[bool]


@dataclass(slots=True)
class _Clear:
    partition: str
    keys: list[str] = field(default_factory=list)


class QueueUploads:
    """The queue of uploads and clears, and the task that sends them. Used on one event loop by the plane, or
    by a `RowWriter` in a remote process."""

    def __init__(self, link: QueueLink, timeout_s: float = TIMEOUT_S) -> None:
        """`timeout_s` is how long one upload or fetch may take before TransferQueue counts as lost."""
        self.link = link
        self.bytes_put = 0
        self.bytes_got = 0
        self.lost: str | None = None
        self._timeout_s = timeout_s
        self._line: deque[_Put | _Clear] = deque()
        self._worker: asyncio.Task[None] | None = None

    async def put(self, partition: str, rows: Mapping[str, Mapping[str, bytes]]) -> bool:
        """Upload frames, by name in the queue and column. False: TransferQueue is lost and holds none of
        them."""
        if self.lost is not None:
            return False
        size = sum(len(frame) for columns in rows.values() for frame in columns.values())
        job = _Put(partition, rows, size, asyncio.get_running_loop().create_future())
        self._enqueue(job)
        return await job.answer

    def clear(self, partition: str, keys: Sequence[str]) -> None:
        """Clear these names, after all earlier puts."""
        if self.lost is None and keys:
            self._enqueue(_Clear(partition, list(keys)))

    async def get(
        self, partition: str, keys: Sequence[str], names: Sequence[str], marks: Marks | None = None
    ) -> dict[str, Jagged | list[Any]] | None:
        """Columns of these rows; None if any cell is missing or TransferQueue is lost."""
        if self.lost is not None:
            return None
        try:
            async with asyncio.timeout(self._timeout_s):
                found = await self.link.get(partition, keys, names, marks or {})
        except Exception as error:
            self._lose(error)
            return None
        for column in (found or {}).values():
            if isinstance(column, Jagged):
                self.bytes_got += column.values.nbytes
        return found

    async def keys(self, partition: str) -> list[str]:
        """All names in the queue, of all writers; empty once TransferQueue is lost."""
        if self.lost is not None:
            return []
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self.link.keys(partition)
        except Exception as error:
            self._lose(error)
            return []

    async def drain(self) -> None:
        """Wait until all puts and clears so far are done."""
        while self._worker is not None:
            await asyncio.wait([self._worker])

    def _enqueue(self, job: _Put | _Clear) -> None:
        self._line.append(job)
        if self._worker is None:
            self._worker = asyncio.get_running_loop().create_task(self._work())

    async def _work(self) -> None:
        try:
            while self._line:
                await self._serve_next()
        finally:
            self._worker = None
            if self._line and self.lost is not None:
                self._answer_the_line()

    async def _serve_next(self) -> None:
        batch = self._next_batch()
        puts = [job for job in batch if isinstance(job, _Put)]
        try:
            async with asyncio.timeout(self._timeout_s):
                if puts:
                    await self._upload(puts)
                else:
                    keys = dict.fromkeys(key for job in batch if isinstance(job, _Clear) for key in job.keys)
                    await self.link.clear(batch[0].partition, list(keys))
        except Exception as error:
            self._lose(error)
        except asyncio.CancelledError:
            self._lose(RuntimeError("its worker was cancelled"))
            raise
        finally:
            for job in puts:
                if not job.answer.done():
                    job.answer.set_result(self.lost is None)

    def _next_batch(self) -> list[_Put | _Clear]:
        """The longest batchable prefix of the queue: jobs of one kind and partition, no row twice."""
        first = self._line.popleft()
        batch, seen, size = [first], _keys(first), _size(first)
        while self._line:
            job = self._line[0]
            if type(job) is not type(first) or job.partition != first.partition:
                break
            if isinstance(job, _Put) and (size + job.size > _MOST_BYTES or not seen.isdisjoint(job.rows)):
                break
            batch.append(self._line.popleft())
            seen |= _keys(job)
            size += _size(job)
        return batch

    async def _upload(self, puts: list[_Put]) -> None:
        """Rows with the same columns, dtypes and widths share a call."""
        groups: dict[Signature, dict[str, dict[str, torch.Tensor]]] = {}
        for job in puts:
            for key, frames in job.rows.items():
                cells = {name: _tensor(frame) for name, frame in frames.items()}
                signature = tuple((name, cells[name].dtype, cells[name].shape[1:]) for name in sorted(cells))
                groups.setdefault(signature, {})[key] = cells
            self.bytes_put += job.size
        await asyncio.gather(
            *(
                self.link.put(
                    puts[0].partition,
                    list(rows),
                    {name: [cells[name] for cells in rows.values()] for name, _, _ in signature},
                )
                for signature, rows in groups.items()
                if signature
            )
        )

    def _lose(self, error: BaseException) -> None:
        self.give_up(f"{type(error).__name__}: {error}")

    def give_up(self, reason: str) -> None:
        """Mark TransferQueue as lost: from now on nothing is put there or read from it."""
        if self.lost is None:
            self.lost = reason
            logger.warning(
                "TransferQueue does not answer (%s): rows are read from the run directory from now on",
                self.lost,
            )
        self._answer_the_line()

    def _answer_the_line(self) -> None:
        for job in self._line:
            if isinstance(job, _Put) and not job.answer.done():
                job.answer.set_result(False)
        self._line.clear()


def _keys(job: _Put | _Clear) -> set[str]:
    return set(job.rows) if isinstance(job, _Put) else set()


def _size(job: _Put | _Clear) -> int:
    return job.size if isinstance(job, _Put) else 0


def _tensor(frame: bytes) -> torch.Tensor:
    """A cell as a tensor: an array without another copy, any other cell as its frame."""
    if frame[0] < FIRST_ARRAY:
        return torch.frombuffer(bytearray(frame), dtype=FRAME_DTYPE)
    array: np.ndarray = decode(frame)
    if array.size == 0:
        return torch.from_numpy(array.copy())
    return torch.frombuffer(frame, dtype=_TORCH[array.dtype], offset=len(frame) - array.nbytes).view(
        array.shape
    )


_TORCH = {np.dtype(name): getattr(torch, name) for name in ("bool", "int32", "int64", "float32", "uint16")}
