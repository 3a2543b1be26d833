"""An external server with a dialect's routes over a model folder. Prints its port and serves until stdin is closed."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import threading
import time

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
    parser.add_argument(
        "--token-seconds", type=float, default=0.0, help="how long each token takes, at least"
    )
    known = parser.parse_args()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(known.model, dtype=torch.float32)
    if known.token_seconds:
        model.register_forward_pre_hook(lambda *_: time.sleep(known.token_seconds))
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
