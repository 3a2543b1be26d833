"""`@bridged`: write a function for real columns, call it with the names of rows.

    @bridged("tokens", "loss_mask")
    def count(columns: ColumnDict) -> ColumnDict:
        return {"loss_tokens": [int(row.sum()) for row in columns["loss_mask"]]}

    count({"tokens": …, "loss_mask": …})        the plain function: nothing is fetched, nothing is written
    with serving(plane):
        await count(lease.meta)                  the columns are fetched here, `loss_tokens` is written to the plane,
                                                 and what comes back is the meta with one more field

Only names travel between caller and callee; the bytes go straight between the plane and the place where the function
runs. The first positional argument may be columns, a `BatchMeta`, a `Lease` (then the write is fenced by it), or
TransferQueue's `KVBatchMeta` or columnar `BatchMeta` (then the answer is one too; see transfer_queue_meta.py). A returned dict is columns to be written; anything else is handed to the caller as it is. Bodies may be sync or async;
sync bodies run in a thread, so they never hold up the event loop. From a thread without an event loop, a sync function
called with a meta blocks until it is done. In a process that is not the plane's: bridge_elsewhere.py.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from understudy.dataplane.base import Columns, Lease
from understudy.dataplane.columns import scatter
from understudy.dataplane.transfer_queue_meta import in_kind, is_columnar, is_keyed, named_by
from understudy.errors import DataPlaneError
from understudy.types.batch import BatchMeta
from understudy.types.jagged import Jagged

ColumnDict: TypeAlias = dict[str, Jagged | list[Any]]


class ColumnPlace(Protocol):
    """What a bridged function needs of a data plane."""

    async def get(
        self, meta: BatchMeta, fields: Sequence[str] | None = None
    ) -> dict[str, Jagged | list[Any]]: ...

    async def put(
        self, partition: str, rows: Mapping[str, Columns], *, lease: Lease | None = None
    ) -> BatchMeta: ...


@dataclass(frozen=True, slots=True)
class _Here:
    plane: ColumnPlace
    loop: asyncio.AbstractEventLoop


_here: ContextVar[_Here | None] = ContextVar("understudy_data_plane", default=None)


@contextmanager
def serving(plane: ColumnPlace) -> Iterator[None]:
    """Bridged functions called inside (also from threads started by `asyncio.to_thread`) use this plane."""
    token = _here.set(_Here(plane, asyncio.get_running_loop()))
    try:
        yield
    finally:
        _here.reset(token)


def bridged(*fields: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Fetch `fields` (all the meta names, if none are given) before the call and write returned columns after it."""

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        is_async = inspect.iscoroutinefunction(function)

        @functools.wraps(function)
        def call(batch: Any, *args: Any, **kwargs: Any) -> Any:
            if not (isinstance(batch, BatchMeta | Lease) or is_keyed(batch) or is_columnar(batch)):
                return function(batch, *args, **kwargs)
            here = _here.get()
            if here is None:
                raise DataPlaneError(
                    f"{function.__name__} was called with the names of rows, and no data plane is at hand: "
                    "call it inside `with serving(plane):`, or with real columns"
                )
            work = _run(here.plane, function, is_async, fields, batch, args, kwargs)
            if is_async or _in_event_loop():
                return work
            return asyncio.run_coroutine_threadsafe(work, here.loop).result()

        return call

    return wrap


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def _run(
    plane: ColumnPlace,
    function: Callable[..., Any],
    is_async: bool,
    fields: tuple[str, ...],
    batch: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    meta, lease = (batch.meta, batch) if isinstance(batch, Lease) else (batch, None)
    theirs = not isinstance(meta, BatchMeta)
    if theirs:
        meta = await named_by(plane, batch)
    columns = await plane.get(meta, fields or None)
    if is_async:
        answer: Awaitable[Any] = function(columns, *args, **kwargs)
    else:
        answer = asyncio.to_thread(function, columns, *args, **kwargs)
    result = await answer
    if not isinstance(result, dict):
        return result
    cells = {name: scatter(name, column, len(meta)) for name, column in result.items()}
    rows = {key: {name: cells[name][i] for name in cells} for i, key in enumerate(meta.keys)}
    if cells and rows:
        await plane.put(meta.partition, rows, lease=lease)
    done = meta.but(fields=meta.fields + tuple(name for name in cells if name not in meta.fields))
    return await in_kind(plane, batch, done) if theirs else done
