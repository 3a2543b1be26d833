"""A writer that stops itself (SIGSTOP) when its row is in the run directory but not in the queue, until SIGCONT."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import numpy as np

from understudy.dataplane.transfer_queue.link import QueueAddress
from understudy.dataplane.transfer_queue.writer import RowWriter


async def main() -> None:
    settings = json.loads(sys.stdin.readline())
    writer = RowWriter(
        Path(settings["folder"]), QueueAddress.load(settings["address"]), prefix=settings["prefix"]
    )
    upload = writer._uploads.put

    async def late(*arguments: object) -> bool:
        os.kill(os.getpid(), signal.SIGSTOP)
        return await upload(*arguments)  # type: ignore[arg-type]

    writer._uploads.put = late  # type: ignore[method-assign]
    columns = {"tokens": np.full(300, settings["token"], np.int32), "reward": float(settings["token"])}
    written = await writer.write("train", {settings["key"]: columns}, settings["segment"])
    print(json.dumps({"queued": written[settings["key"]].queued}), flush=True)
    writer.close()


asyncio.run(main())
