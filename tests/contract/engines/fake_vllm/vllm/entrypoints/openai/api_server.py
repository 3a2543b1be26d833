"""vLLM's command line and the routes we use, over a small model in transformers. The test puts `wire_servers` on the path."""

from __future__ import annotations

import argparse
import asyncio

import torch
import uvicorn
from starlette.applications import Starlette
from transformers import AutoModelForCausalLM
from wire_servers import WireServer


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--uds")
    parser.add_argument("--model")
    parser.add_argument("--max-model-len", type=int)
    known, _ = parser.parse_known_args()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(known.model, dtype=torch.float32)
    server = WireServer("vllm", model, known.max_model_len)
    app = Starlette(routes=server.routes)
    await uvicorn.Server(uvicorn.Config(app, uds=known.uds, log_level="error", lifespan="off")).serve()


if __name__ == "__main__":
    asyncio.run(main())
