"""Servers with vLLM's and OpenAI's JSON, as recorded from them, and SGLang's, over a plain transformers model.

`flavour` names the dialect; requests in another one are refused with the error of the real server.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from transformers import AutoModelForCausalLM

MAX_LOGPROBS = 20


class FakeCompletions:
    def __init__(self, folder: Path, flavour: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.name = str(folder)
        self.flavour = flavour
        self.spoil: str | None = None
        self.refused: list[int] | None = None
        """A sequence that the server refuses."""

    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return self.model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)

    def refuse(self, message: str, status: int = 400) -> Response:
        return JSONResponse(
            {"error": {"message": message, "type": "BadRequestError", "code": status}}, status
        )

    def prompt_logprobs(self, tokens: list[int], k: int) -> list[dict[str, Any] | None]:
        table = self.logprobs(tokens)
        listed: list[dict[str, Any] | None] = [None]
        for position in range(1, len(tokens)):
            row = table[position - 1]
            own = tokens[position]
            # vLLM lists the prompt's token first, then the K best; both are one entry when they coincide.
            ids = dict.fromkeys([own, *row.topk(k).indices.tolist()])
            listed.append(
                {
                    str(i): {
                        "logprob": float(row[i]),
                        "rank": int((row > row[i]).sum()) + 1,
                        "decoded_token": f"<{i}>",
                    }
                    for i in ids
                }
            )
        if self.spoil == "null":
            listed[-1] = None
        elif self.spoil == "shifted":
            listed = [None, *listed[:1], *listed[1:-1]]
        elif self.spoil == "short":
            listed = listed[:-1]
        return listed

    async def generate(self, http: Request) -> Response:
        if self.flavour != "vllm":
            return JSONResponse({"detail": "Not Found"}, 404)
        question = await http.json()
        if question["token_ids"] == self.refused:
            return self.refuse("This sequence is not served here.")
        sampling = question["sampling_params"]
        assert sampling["detokenize"] is False
        k = sampling["prompt_logprobs"]
        if k > MAX_LOGPROBS:
            return self.refuse(
                f"Requested prompt logprobs of {k}, which is greater than max allowed: {MAX_LOGPROBS}"
            )
        listed = await asyncio.to_thread(self.prompt_logprobs, question["token_ids"], k)
        choices = [{"index": 0, "logprobs": None, "finish_reason": "length", "token_ids": [5]}]
        return JSONResponse({"request_id": "r", "choices": choices, "prompt_logprobs": listed})

    async def return_logprob(self, http: Request) -> Response:
        if self.flavour != "sglang":
            return JSONResponse({"detail": "Not Found"}, 404)
        question = await http.json()
        tokens, start, k = question["input_ids"], question["logprob_start_len"], question["top_logprobs_num"]
        if tokens == self.refused:
            return self.refuse("This sequence is not served here.")
        table = await asyncio.to_thread(self.logprobs, tokens)
        last = table.shape[1] - 1
        own: list[Any] = [[None, tokens[start], None]]
        tops: list[Any] = [None]
        for position in range(start + 1, len(tokens)):
            row, token = table[position - 1], tokens[position]
            own.append([float(row[token]), token if token < last else 0, None])
            best = row.topk(k)
            tops.append(
                [[v, i, None] for v, i in zip(best.values.tolist(), best.indices.tolist(), strict=True)]
            )
        if self.spoil == "null":
            own[-1][0] = None
        elif self.spoil == "shifted":
            own, tops = [own[0], own[0], *own[1:-1]], [None, *tops[:-1]]
        elif self.spoil == "short":
            own = own[:-1]
        meta = {"input_token_logprobs": own, "prompt_tokens": len(tokens)}
        return JSONResponse({"text": "x", "meta_info": meta | ({"input_top_logprobs": tops} if k else {})})

    async def completions(self, http: Request) -> Response:
        if self.spoil == "no tokenizer":  # SGLang with --skip-tokenizer-init
            return self.refuse("Internal server error: 'text'", 500)
        question = await http.json()
        tokens = question["prompt"]
        if tokens == self.refused:
            return self.refuse("This sequence is not served here.")
        if self.flavour == "old vllm" and "prompt_logprobs" in question:
            listed = await asyncio.to_thread(self.prompt_logprobs, tokens, question["prompt_logprobs"])
            return JSONResponse(
                {"id": "c", "choices": [{"index": 0, "text": "x", "prompt_logprobs": listed}]}
            )
        if "prompt_logprobs" in question:  # OpenAI's own server ignores unknown fields
            return JSONResponse({"id": "c", "choices": [{"index": 0, "text": "x", "logprobs": None}]})
        if self.flavour in ("no echo", "sglang"):
            return self.refuse(
                "Setting 'echo' and 'logprobs' at the same time is not supported for this model."
            )
        if question["logprobs"] > 5:
            return self.refuse("Invalid value for 'logprobs': must be less than or equal to 5.")
        return JSONResponse(
            {"choices": [{"logprobs": await asyncio.to_thread(self.echoed, tokens, question)}]}
        )

    def echoed(self, tokens: list[int], question: dict[str, Any]) -> dict[str, Any]:
        by_id = self.flavour == "echo with ids"
        table = self.logprobs(tokens)

        def named(token: int) -> str:
            return f"token_id:{token}" if by_id else f"<{token}>"

        tops: list[dict[str, float] | None] = [None]
        for position in range(1, len(tokens)):
            best = table[position - 1].topk(question["logprobs"])
            tops.append(
                {named(i): v for v, i in zip(best.values.tolist(), best.indices.tolist(), strict=True)}
            )
        own = [None, *(float(table[p - 1, tokens[p]]) for p in range(1, len(tokens)))]
        # One generated token follows the prompt.
        return {
            "tokens": [*map(named, tokens), named(7)],
            "token_logprobs": [*own, -0.5],
            "top_logprobs": [*tops, {named(7): -0.5}],
        }

    async def models(self, _: Request) -> Response:
        served: dict[str, Any] = {"id": "served", "object": "model"}
        if "vllm" in self.flavour or self.flavour == "sglang":
            served |= {"root": self.name, "max_model_len": 256}
        return JSONResponse({"object": "list", "data": [served]})

    async def health(self, _: Request) -> Response:
        return Response(b"")

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/inference/v1/generate", self.generate, methods=["POST"]),
                Route("/generate", self.return_logprob, methods=["POST"]),
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/health", self.health),
            ]
        )


@contextlib.contextmanager
def running(fake: FakeCompletions) -> Iterator[str]:
    """The fake behind a real socket, in a thread."""
    server = uvicorn.Server(uvicorn.Config(fake.app(), port=0, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        threading.Event().wait(0.01)
    host, port = server.servers[0].sockets[0].getsockname()[:2]
    try:
        yield f"http://{host}:{port}"
    finally:
        server.should_exit = True
        thread.join(10)
