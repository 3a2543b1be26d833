"""A process without Ray that reads rows by name from a queue's address and prints what it got."""

import asyncio
import json
import sys

from understudy.dataplane.transfer_queue.link import QueueAddress
from understudy.dataplane.transfer_queue.plane import QueueReader
from understudy.types.batch import BatchMeta


async def main() -> None:
    settings = json.loads(sys.stdin.read())
    reader = QueueReader(QueueAddress.load(settings["address"]))
    columns = await reader.get(BatchMeta("train", tuple(settings["keys"]), tuple(settings["fields"])))
    answer = {
        "rows": [row.tolist() for row in columns["topk"]],
        "reward": columns["reward"],
        "dtype": str(columns["topk"].values.dtype),
        "bytes": reader.bytes_got,
        "ray": "ray" in sys.modules and sys.modules["ray"].is_initialized(),
    }
    print(json.dumps(answer), flush=True)
    reader.close()


asyncio.run(main())
