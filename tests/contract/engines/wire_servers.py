"""Servers with the documented wire formats of vLLM, SGLang and OpenAI completions, over a real small model.

They run in the test's event loop on a loopback port. Their answers follow the servers' documented formats; those of
vLLM were compared with answers of version 0.32.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import uvicorn
from safetensors.torch import load_file
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from understudy.engines.base import GenerateRequest, Generation, Sampling
from understudy.engines.local.engine import HFEngine
from understudy.engines.local.scheduler import Batching
from understudy.types.trajectory import StopReason


class WireServer:
    """A generation server with the control routes of its dialect."""

    def __init__(self, dialect: str, model: Any, max_length: int) -> None:
        self.dialect, self.eos = dialect, int(model.config.eos_token_id)
        self.engine = HFEngine(
            model, max_batch=16, device="cpu", pad_id=0, max_length=max_length, batching=Batching.CONTINUOUS
        )
        self.label = "default"
        self.bodies: list[dict[str, Any]] = []
        self.failures: list[int] = []
        """Error statuses with which the next generation requests are answered."""
        self._open = asyncio.Event()
        self._open.set()
        self._running = 0

    @property
    def routes(self) -> list[Route]:
        paths: dict[str, Any] = {"/health": self.health}
        if self.dialect == "vllm":
            paths |= {
                "/inference/v1/generate": self.vllm_generate,
                "/pause": self.pause,
                "/resume": self.resume,
                "/abort_requests": self.abort,
                "/reset_prefix_cache": self.ok,
                "/collective_rpc": self.vllm_rpc,
                "/update_weight_version": self.vllm_label,
            }
        elif self.dialect == "sglang":
            paths |= {
                "/generate": self.sglang_generate,
                "/pause_generation": self.pause,
                "/continue_generation": self.resume,
                "/abort_request": self.abort,
                "/flush_cache": self.sglang_flush,
                "/update_weights_from_disk": self.sglang_load,
            }
        else:
            paths |= {"/v1/completions": self.openai_generate}
        return [Route(path, handler, methods=["GET", "POST"]) for path, handler in paths.items()]

    async def health(self, request: Request) -> Response:
        return Response()

    async def ok(self, request: Request) -> Response:
        return JSONResponse({"success": True})

    async def pause(self, request: Request) -> Response:
        body = json.loads(await request.body() or b"{}")
        assert request.query_params.get("mode", body.get("mode")) == "abort"
        self._open.clear()
        while self._running:  # a server may be between taking a request and scheduling it
            await self.engine.abort()
            await asyncio.sleep(0.005)
        return JSONResponse({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        self._open.set()
        return JSONResponse({"status": "resumed"})

    async def abort(self, request: Request) -> Response:
        await self.engine.abort()
        return JSONResponse({"status": "aborted"})

    async def _generate(self, ids: list[int], sampling: Sampling, seed: int) -> Generation:
        await self._open.wait()
        self._running += 1
        try:
            (generation,) = await self.engine.generate(
                [GenerateRequest("wire", np.array(ids, np.int32), sampling, seed)]
            )
        finally:
            self._running -= 1
        return generation

    def _sampling(self, params: dict[str, Any], max_tokens: int, candidates: int = 0) -> Sampling:
        stops = tuple(params["stop_token_ids"])
        if (
            self.dialect == "sglang"
        ):  # with `ignore_eos` SGLang ignores all stop ids; without it the model's own end token stops too
            stops = () if params["ignore_eos"] else (*stops, self.eos)
        else:
            assert params["ignore_eos"] is True
        return Sampling(
            max_tokens,
            stops,
            temperature=params["temperature"],
            top_p=params["top_p"],
            top_k=max(params["top_k"], 0),
            min_p=params["min_p"],
            repetition_penalty=params["repetition_penalty"],
            candidates=candidates,
        )

    async def _body(self, request: Request) -> dict[str, Any] | Response:
        body: dict[str, Any] = await request.json()
        self.bodies.append(body)
        if self.failures:
            return JSONResponse({"error": {"message": "no"}}, status_code=self.failures.pop(0))
        return body

    async def vllm_generate(self, request: Request) -> Response:
        body = await self._body(request)
        if isinstance(body, Response):
            return body
        params = body["sampling_params"]
        assert body["cache_salt"]
        sampling = self._sampling(params, params["max_tokens"], params["logprobs"])
        generation = await self._generate(body["token_ids"], sampling, params.get("seed", 0))
        ids, logprobs = generation.tokens.tolist(), generation.logprobs.tolist()
        finish = {StopReason.EOS: "stop", StopReason.LENGTH: "length", StopReason.ABORTED: "abort"}[
            generation.stop_reason
        ]
        content = [
            {
                "token_id": i,
                "logprob": x,
                "rank": 1,
                "top_logprobs": [
                    {"token_id": j, "logprob": y, "rank": 1}
                    for y, j in _top(i, x, best)[: max(params["logprobs"], 1)]
                ],
            }
            for i, x, best in zip(ids, logprobs, _best_of(generation), strict=True)
        ]
        choice = {
            "index": 0,
            "finish_reason": finish,
            "stop_reason": ids[-1] if finish == "stop" else None,
            "token_ids": ids,
            "weight_versions": [{"version": self.label, "start": 0, "end": len(ids)}],
            "logprobs": {"content": content},
        }
        return JSONResponse({"request_id": "generate-tokens-x", "model": body["model"], "choices": [choice]})

    async def vllm_rpc(self, request: Request) -> Response:
        body = await request.json()
        assert body["method"] == "understudy_load_weights"
        path, version = body["args"]
        count = await self._load(path, int(version))
        return JSONResponse({"results": [{"version": version, "tensors": count}]})

    async def vllm_label(self, request: Request) -> Response:
        self.label = (await request.json())["new_version"]
        return JSONResponse({"success": True, "new_version": self.label})

    async def sglang_generate(self, request: Request) -> Response:
        body = await self._body(request)
        if isinstance(body, Response):
            return body
        params = body["sampling_params"]
        assert body["return_logprob"] is True
        sampling = self._sampling(params, params["max_new_tokens"], body["top_logprobs_num"])
        generation = await self._generate(body["input_ids"], sampling, params.get("sampling_seed", 0))
        ids, logprobs = generation.tokens.tolist(), generation.logprobs.tolist()
        finish: dict[str, Any] = {"type": "abort", "message": "Aborted"}
        if generation.stop_reason is StopReason.EOS:
            finish = {"type": "stop", "matched": ids[-1]}
        elif generation.stop_reason is StopReason.LENGTH:
            finish = {"type": "length", "length": len(ids)}
        meta = {
            "finish_reason": finish,
            "output_token_logprobs": [[x, i, None] for x, i in zip(logprobs, ids, strict=True)],
        }
        if body["top_logprobs_num"]:
            meta["output_top_logprobs"] = [
                [[-float(rank), i, None] for rank, i in enumerate(best, 1)] for best in _best_of(generation)
            ]
        return JSONResponse({"text": "", "output_ids": ids, "meta_info": meta})

    async def sglang_flush(self, request: Request) -> Response:
        return Response("Cache flushed.\nPlease check backend logs for more details.\n")  # of no content type

    async def sglang_load(self, request: Request) -> Response:
        body = await request.json()
        await self._load(f"{body['model_path']}/model.safetensors", int(body["weight_version"]))
        return JSONResponse({"success": True, "message": "Succeeded to update model weights."})

    async def openai_generate(self, request: Request) -> Response:
        body = await self._body(request)
        if isinstance(body, Response):
            return body
        generation = await self._generate(
            body["prompt"], self._sampling(body, body["max_tokens"]), body.get("seed", 0)
        )
        ids, logprobs = generation.tokens.tolist(), generation.logprobs.tolist()
        choice = {
            "index": 0,
            "text": "",
            "token_ids": ids if body.get("return_token_ids") else None,
            "logprobs": {"tokens": [f"token_id:{i}" for i in ids], "token_logprobs": logprobs},
            "finish_reason": "stop" if generation.stop_reason is StopReason.EOS else "length",
        }
        return JSONResponse({"object": "text_completion", "choices": [choice]})

    async def _load(self, path: str, version: int) -> int:
        weights = load_file(path)
        await self.engine.update_weights(version, weights.items())
        return len(weights)


def _best_of(generation: Generation) -> list[list[int]]:
    if generation.candidate_ids is None:
        return [[] for _ in generation.tokens]
    return [list(map(int, best)) for best in generation.candidate_ids]


def _top(token: int, logprob: float, best: list[int]) -> list[tuple[float, int]]:
    """Candidates in vLLM's order: the generated token first, then the others by rank."""
    ranked = [(-float(rank), i) for rank, i in enumerate(best, 1)]
    if token in best:
        return [(-float(best.index(token) + 1), token), *(one for one in ranked if one[1] != token)]
    return [(-1e3, token), *ranked]


@asynccontextmanager
async def listening(server: WireServer) -> AsyncIterator[str]:
    """The server's address."""
    app = Starlette(routes=server.routes)
    http = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off"))
    task = asyncio.create_task(http.serve())
    while not http.started:
        await asyncio.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{http.servers[0].sockets[0].getsockname()[1]}"
    finally:
        http.should_exit = True
        await server.engine.close()
        await task
