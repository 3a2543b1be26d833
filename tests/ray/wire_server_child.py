"""A server that somebody else started: a dialect's routes over a model folder, until stdin closes. Prints its port."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import threading

import torch
import uvicorn
from starlette.applications import Starlette
from transformers import AutoModelForCausalLM
from wire_servers import WireServer


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("dialect")
    parser.add_argument("model")
    parser.add_argument("--host")
    known = parser.parse_args()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(known.model, dtype=torch.float32)
    server = WireServer(known.dialect, model, model.config.max_position_embeddings)
    http = uvicorn.Server(
        uvicorn.Config(
            Starlette(routes=server.routes), host=known.host, port=0, log_level="error", lifespan="off"
        )
    )
    serving = asyncio.create_task(http.serve())
    while not http.started:
        await asyncio.sleep(0.01)
    print(http.servers[0].sockets[0].getsockname()[1], flush=True)
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    await serving


if __name__ == "__main__":
    asyncio.run(main())
