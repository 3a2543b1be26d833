"""`@bridged`: functions written for real columns that can be called with the names of rows.

    @bridged("tokens", "loss_mask")
    def count(columns: ColumnDict) -> ColumnDict:
        return {"loss_tokens": [int(row.sum()) for row in columns["loss_mask"]]}

    count({"tokens": …, "loss_mask": …})        the plain function: nothing is fetched, nothing is written
    with bridging(plane):
        await count(lease.meta)                  the columns are fetched here, `loss_tokens` is written to the plane,
                                                 and what comes back is the meta with one more field

Only names are passed between caller and callee; the bytes go directly between the plane and the process where
the function runs.

| argument | becomes | the answer |
|---|---|---|
| columns (or anything else) | itself | what the function returns |
| `BatchMeta`, positional or by keyword | its columns | a returned dict is written as columns; the meta with them |
| `Lease` | the columns of its rows | the same; the write is fenced by the lease |
| TransferQueue's `KVBatchMeta` or columnar `BatchMeta` | its columns | a meta of the same class (meta.py) |

A function with a parameter called `extra` gets the meta's `extra` (TransferQueue: `extra_info`) as a dict,
unless the caller passes one. A meta of no rows becomes empty columns. A result that is not a dict is returned
unchanged.

Functions may be sync or async. Sync functions run on a thread, so they do not block the event loop; called on
the event loop, they return an awaitable. Called with a meta on a thread without an event loop, they block
until done.

`call_remote` runs a bridged function in another process, where `answer_call` executes it:

    plane's process                                     remote process
    call_remote ── RemoteCall: meta, segment ────────>  answer_call: reads columns from the queue,
                                                        writes columns to segment and queue
    adopt       <── RemoteResult: result, Written ────
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch

from understudy.dataplane.base import Columns, Lease
from understudy.dataplane.columns import scatter
from understudy.dataplane.transfer_queue.meta import in_kind, is_columnar, is_keyed, named_by
from understudy.dataplane.transfer_queue.segments import WrittenRow
from understudy.errors import DataPlaneError
from understudy.types.batch import BatchMeta
from understudy.types.jagged import Jagged

if TYPE_CHECKING:
    from understudy.dataplane.transfer_queue.plane import TransferQueueDataPlane
    from understudy.dataplane.transfer_queue.writer import RowWriter


ColumnDict: TypeAlias = dict[str, Jagged | list[Any]]


class ColumnPlace(Protocol):
    """The part of a data plane that a bridged function uses."""

    async def get(
        self, meta: BatchMeta, fields: Sequence[str] | None = None
    ) -> dict[str, Jagged | list[Any]]: ...

    async def put(
        self, partition: str, rows: Mapping[str, Columns], *, lease: Lease | None = None
    ) -> BatchMeta: ...


@dataclass(frozen=True, slots=True)
class _CurrentPlane:
    """The plane that bridged functions use in this context, and the event loop on which it is called."""

    plane: ColumnPlace
    loop: asyncio.AbstractEventLoop


_current: ContextVar[_CurrentPlane | None] = ContextVar("understudy_data_plane", default=None)


@contextmanager
def bridging(plane: ColumnPlace) -> Iterator[None]:
    """Bridged functions called in this context (also on threads of `asyncio.to_thread`) use this plane."""
    token = _current.set(_CurrentPlane(plane, asyncio.get_running_loop()))
    try:
        yield
    finally:
        _current.reset(token)


def bridged(*fields: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Fetch `fields` (default: all that the meta names) before the call and write returned columns after
    it."""
    if any(callable(field) for field in fields):
        raise TypeError("@bridged takes the names of columns: write @bridged() or @bridged('tokens', …)")

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        is_async = inspect.iscoroutinefunction(function)
        signature = inspect.signature(function)
        extra = signature.parameters.get("extra")
        takes_extra = extra is not None and extra.kind in (extra.POSITIONAL_OR_KEYWORD, extra.KEYWORD_ONLY)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            places: list[int | str] = [place for place, value in enumerate(args) if _names_rows(value)]
            places += [name for name, value in kwargs.items() if _names_rows(value)]
            if not places:
                return function(*args, **kwargs)
            if len(places) > 1:
                raise DataPlaneError(
                    f"{function.__name__} was called with the names of rows in {len(places)} arguments; one call works on one "
                    "batch: fetch the others with plane.get, or join rows of one partition with BatchMeta.concat"
                )
            here = _current.get()
            if here is None:
                raise DataPlaneError(
                    f"{function.__name__} was called with the names of rows, and no data plane is at hand: "
                    "call it inside `with bridging(plane):`, or with real columns"
                )
            wants_extra = takes_extra and "extra" not in signature.bind_partial(*args, **kwargs).arguments
            invoke = _Invocation(function, args, kwargs, places[0], wants_extra)
            work = _run(here.plane, invoke, is_async, fields)
            if is_async or _in_event_loop():
                return work
            return asyncio.run_coroutine_threadsafe(work, here.loop).result()

        return call

    return wrap


def _names_rows(value: Any) -> bool:
    return isinstance(value, BatchMeta | Lease) or is_keyed(value) or is_columnar(value)


@dataclass(frozen=True, slots=True)
class _Invocation:
    """One call of a bridged function, and which of its arguments names rows."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    place: int | str
    """A position or a keyword."""
    wants_extra: bool

    @property
    def batch(self) -> Any:
        return self.args[self.place] if isinstance(self.place, int) else self.kwargs[self.place]

    def with_columns(self, columns: ColumnDict, extra: Mapping[str, Any]) -> Callable[[], Any]:
        args, kwargs = list(self.args), dict(self.kwargs)
        if isinstance(self.place, int):
            args[self.place] = columns
        else:
            kwargs[self.place] = columns
        if self.wants_extra:
            kwargs["extra"] = dict(extra)
        return functools.partial(self.function, *args, **kwargs)


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def _run(plane: ColumnPlace, invoke: _Invocation, is_async: bool, fields: tuple[str, ...]) -> Any:
    batch = invoke.batch
    meta, lease = (batch.meta, batch) if isinstance(batch, Lease) else (batch, None)
    theirs = not isinstance(meta, BatchMeta)
    if theirs:
        meta = await named_by(plane, batch)
    columns = await plane.get(meta, fields or None) if len(meta) else _no_rows(fields or meta.fields)
    body = invoke.with_columns(columns, meta.extra)
    result = await (body() if is_async else asyncio.to_thread(body))
    if not isinstance(result, dict):
        return result
    cells = {name: scatter(name, column, len(meta)) for name, column in result.items()}
    rows = {key: {name: cells[name][i] for name in cells} for i, key in enumerate(meta.keys)}
    if cells and rows:
        await plane.put(meta.partition, rows, lease=lease)
    done = meta.but(fields=meta.fields + tuple(name for name in cells if name not in meta.fields))
    return await in_kind(plane, batch, done) if theirs else done


def _no_rows(fields: Sequence[str]) -> ColumnDict:
    """Columns of no rows. Their dtypes are unknown; a `Jagged` can be read like a list too."""
    return {
        name: Jagged(torch.empty(0, dtype=torch.float32), torch.zeros(1, dtype=torch.int64))
        for name in fields
    }


@dataclass(frozen=True, slots=True)
class RemoteCall:
    """A request to a remote process: the rows by name, and the spill segment for what it writes."""

    meta: BatchMeta
    segment: int


@dataclass(frozen=True, slots=True)
class RemoteResult:
    result: Any
    """The function's result: the meta with its new fields, or a value that is not columns."""
    written: tuple[Mapping[str, WrittenRow], ...]
    """Announcements of new columns, by key; one per write."""


async def call_remote(
    plane: TransferQueueDataPlane,
    batch: BatchMeta | Lease,
    fields: Sequence[str],
    ask: Callable[[RemoteCall], Awaitable[RemoteResult]],
    *,
    site: int = 0,
) -> Any:
    """Run a bridged function in a remote process over these rows. `fields` are the columns it reads. `ask`
    sends the request; `site` is the unique number of the process it reaches, among all that write for this
    plane. With a `Lease` the write is fenced by it."""
    meta, lease = (batch.meta, batch) if isinstance(batch, Lease) else (batch, None)
    handed = await plane.hand_over(meta, fields)
    # This reference keeps the segment until the columns written there are adopted.
    segment = plane.writer_segments.take(site)
    answer = await ask(RemoteCall(handed, segment.number))
    for written in answer.written:
        await plane.adopt(meta.partition, written, lease=lease)
    if not isinstance(answer.result, BatchMeta):
        return answer.result
    new = tuple(name for name in answer.result.fields if name not in (*meta.fields, *handed.fields))
    return meta.but(fields=meta.fields + new)


async def answer_call(
    writer: RowWriter, function: Callable[..., Any], call: RemoteCall, *args: Any, **kwargs: Any
) -> RemoteResult:
    """Executes a call in the remote process. Many may run concurrently."""
    columns = _RecordedColumns(writer, call.segment)
    with bridging(columns):
        result = await function(call.meta, *args, **kwargs)
    return RemoteResult(result, tuple(columns.written))


@dataclass(slots=True)
class _RecordedColumns:
    """The `ColumnPlace` of one call: reads from the queue, writes through the `RowWriter`."""

    writer: RowWriter
    segment: int
    written: list[Mapping[str, WrittenRow]] = field(default_factory=list)

    async def get(
        self, meta: BatchMeta, fields: Sequence[str] | None = None
    ) -> dict[str, Jagged | list[Any]]:
        names = tuple(fields or meta.fields)
        if missing := [name for name in names if name not in meta.fields]:
            raise DataPlaneError(
                f"the function reads {', '.join(missing)}, and the call was sent with {', '.join(meta.fields) or 'nothing'}; "
                "name every column it reads in `call_remote`"
            )
        return await self.writer.read(meta.partition, meta.keys, names, meta.marks)

    async def put(
        self, partition: str, rows: Mapping[str, Columns], *, lease: Lease | None = None
    ) -> BatchMeta:
        self.written.append(await self.writer.write(partition, rows, self.segment))
        return BatchMeta(partition, tuple(rows))
