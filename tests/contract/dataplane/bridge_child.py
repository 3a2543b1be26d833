"""A process with a queue, a run directory and bridged functions. It runs one call per line until its input ends."""

import asyncio
import base64
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch

from understudy.dataplane.transfer_queue.bridge import ColumnDict, RemoteCall, answer_call, bridged
from understudy.dataplane.transfer_queue.link import QueueAddress
from understudy.dataplane.transfer_queue.writer import RowWriter
from understudy.types.jagged import Jagged


@bridged("tokens")
def measure(columns: ColumnDict, factor: int = 1) -> ColumnDict:
    tokens: Any = columns["tokens"]
    return {
        "length": [len(row) * factor for row in tokens],
        "squares": Jagged(tokens.values.to(torch.float32).square(), tokens.offsets),
    }


@bridged("squares")
async def total(columns: ColumnDict) -> float:
    squares: Any = columns["squares"]
    return float(squares.values.sum())


FUNCTIONS = {"measure": measure, "total": total}


async def main() -> None:
    settings = json.loads(sys.stdin.readline())
    writer = RowWriter(
        Path(settings["folder"]), QueueAddress.load(settings["address"]), prefix=settings["prefix"]
    )
    while line := await asyncio.to_thread(sys.stdin.readline):
        name, call, arguments = json.loads(line)
        given = msgspec.msgpack.decode(base64.b64decode(call), type=RemoteCall)
        try:
            answer = await answer_call(writer, FUNCTIONS[name], given, **arguments)
            reply = base64.b64encode(msgspec.msgpack.encode([answer.result, answer.written])).decode()
        except Exception as error:
            reply = f"!{error}"
        print("answer", reply, flush=True)
    writer.close()


asyncio.run(main())
