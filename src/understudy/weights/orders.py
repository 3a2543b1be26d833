"""The order to take new weights, and how a process that gets one reads them.

    POST /v1/weights   WeightsOrder(version, file)     a snapshot in the folder that trainer and process share
                       WeightsOrder(version, stream)   a broadcast through a process group

Engine processes and teacher replicas take the same orders, so the trainer sends weights to both in one way.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec
from safetensors import SafetensorError, safe_open
from torch import Tensor

from understudy.errors import EngineError
from understudy.serving.http import Refused
from understudy.weights.broadcast import Receiver, StreamOrder

BROKEN_TRANSFER = 409
"""Status of a weights order whose tensors did not all arrive: the process keeps its current weights."""
LARGEST_ORDER = 16 << 20
"""Large, because it names every tensor of a broadcast."""
_SNAPSHOT = re.compile(r"v-?\d{1,18}\.safetensors")


class WeightsOrder(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /v1/weights`: load `file`, a name in the shared folder, or receive `stream`.

    With neither, only the version changes.
    """

    version: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]
    """-1: the weights the process was started with. Tokens carry it as an int32."""
    file: str | None = None
    stream: StreamOrder | None = None


class OrderedWeights:
    """Reads the tensors of orders, one order at a time.

    `folder` is the only one that snapshots are read from. `address` is this process's address in a broadcast
    group. With NCCL, broadcasts pass through memory of `device`.
    """

    def __init__(self, folder: Path | None, address: str, device: str) -> None:
        self._folder = folder
        self._receiver = Receiver(address, device)

    async def tensors(self, order: WeightsOrder) -> Iterable[tuple[str, Tensor]]:
        """A broadcast is complete when this returns. A snapshot is read one tensor at a time, so that it is
        never in memory twice."""
        if order.stream is not None:
            return await asyncio.to_thread(self._receiver.receive, order.stream)
        return self._snapshot(order.file)

    def _snapshot(self, file: str | None) -> Iterator[tuple[str, Tensor]]:
        if file is None:
            return
        if self._folder is None or not _SNAPSHOT.fullmatch(file):
            raise Refused(400, "weights", f"{file!r} is not a snapshot in this process's weights folder")
        try:
            with safe_open(self._folder / file, framework="pt", device="cpu") as snapshot:
                for name in snapshot.keys():  # noqa: SIM118 - not a mapping
                    yield name, snapshot.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise EngineError(f"the snapshot {file} cannot be read: {error}") from error
