"""`@bridged` functions in a process that is not the plane's: names go there, names come back.

    the plane's process                                       any process of the cluster
    done = await call_elsewhere(plane, lease, ("tokens",),    far = FarBridge(RowWriter(folder, address))
                                ask=actor.count)  ──Errand──>     return await far.run(count, errand)
              columns stay where they are         <──Answer──         fetches tokens, writes what it returns

How an `Errand` travels is the caller's affair (a Ray actor, a socket): it is plain data, and so is the `Answer`. New columns lie in the
run directory and the queue when the answer leaves; they count once the plane has adopted them, which `call_elsewhere` does. A
process that dies on the way leaves nothing that anybody refers to, and the call may be made again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from understudy.dataplane.base import Columns, Lease
from understudy.dataplane.transfer_queue.bridge import serving
from understudy.dataplane.transfer_queue.segments import Written
from understudy.errors import DataPlaneError
from understudy.types.batch import BatchMeta
from understudy.types.jagged import Jagged

if TYPE_CHECKING:
    from understudy.dataplane.transfer_queue.plane import TransferQueueDataPlane
    from understudy.dataplane.transfer_queue.writer import RowWriter


@dataclass(frozen=True, slots=True)
class Errand:
    """Which rows, by name, and where in the run directory what is written of them goes."""

    meta: BatchMeta
    segment: int


@dataclass(frozen=True, slots=True)
class Answer:
    result: Any
    """What the function gave: the meta with its new fields, or anything that is no columns."""
    written: tuple[Mapping[str, Written], ...]
    """Announcements of new columns, by key; one for each time columns were written."""


async def call_elsewhere(
    plane: TransferQueueDataPlane,
    batch: BatchMeta | Lease,
    fields: Sequence[str],
    ask: Callable[[Errand], Awaitable[Answer]],
    *,
    site: int = 0,
) -> Any:
    """Have a bridged function run elsewhere over these rows. `fields` is what it reads; `site` is a number of the process that
    `ask` reaches, its own among those that write for this plane. With a `Lease` the write is fenced by it."""
    meta, lease = (batch.meta, batch) if isinstance(batch, Lease) else (batch, None)
    handed = await plane.hand_over(meta, fields)
    ticket = plane.lent.take(site)  # held until what was written under it is adopted
    answer = await ask(Errand(handed, ticket.number))
    for written in answer.written:
        await plane.adopt(meta.partition, written, lease=lease)
    if not isinstance(answer.result, BatchMeta):
        return answer.result
    new = tuple(name for name in answer.result.fields if name not in (*meta.fields, *handed.fields))
    return meta.but(fields=meta.fields + new)


class FarBridge:
    """The other side. Many errands may run at once."""

    def __init__(self, writer: RowWriter) -> None:
        self._writer = writer

    async def run(self, function: Callable[..., Any], errand: Errand, *args: Any, **kwargs: Any) -> Answer:
        desk = _Desk(self._writer, errand.segment)
        with serving(desk):
            result = await function(errand.meta, *args, **kwargs)
        return Answer(result, tuple(desk.written))


@dataclass(slots=True)
class _Desk:
    """What a bridged function needs of a plane, for one errand."""

    writer: RowWriter
    segment: int
    written: list[Mapping[str, Written]] = field(default_factory=list)

    async def get(
        self, meta: BatchMeta, fields: Sequence[str] | None = None
    ) -> dict[str, Jagged | list[Any]]:
        names = tuple(fields or meta.fields)
        if missing := [name for name in names if name not in meta.fields]:
            raise DataPlaneError(
                f"the function reads {', '.join(missing)}, and the errand was sent with {', '.join(meta.fields) or 'nothing'}; "
                "name every column it reads in `call_elsewhere`"
            )
        return await self.writer.read(meta.partition, meta.keys, names, meta.marks)

    async def put(
        self, partition: str, rows: Mapping[str, Columns], *, lease: Lease | None = None
    ) -> BatchMeta:
        self.written.append(await self.writer.write(partition, rows, self.segment))
        return BatchMeta(partition, tuple(rows))
