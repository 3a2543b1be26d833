"""What one remote worker's generation costs the trainer's process: CPU time and bytes.

    python benchmarks/rollout/worker_tokens.py            about a minute
    python benchmarks/rollout/worker_tokens.py --quick    few generations, nothing written

Two rollout workers are processes of their own and connect to the trainer by TCP, as on other machines. Their
loops generate once per session. The engine is a process too. It answers at once with prepared tokens, so only
the transport is measured:

    engine process    our own wire format (`HostedEngine`)
    vLLM              JSON with logprobs, as a vLLM server answers (`RemoteEngine`)

CPU time is that of the trainer's process (all its threads). Bytes are what it sends and receives for
generations, to and from workers and engine. Results go to
benchmarks/results/worker_tokens-<hardware>-<date>.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import asynccontextmanager, suppress
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from transformers import AutoTokenizer

import understudy
from understudy.engines.base import Engine, GenerateRequest, Generation, Sampling
from understudy.engines.hosted.app import HostApp
from understudy.engines.hosted.engine import HostedEngine
from understudy.engines.hosted.weights import WeightDelivery
from understudy.engines.local.scheduler import Batching
from understudy.engines.replicas import Endpoint
from understudy.engines.servers.dialects import DIALECTS
from understudy.engines.servers.engine import RemoteEngine
from understudy.rollout.agents.agent import LoopContext
from understudy.rollout.render import Renderer
from understudy.rollout.workers.connections import WorkerListener
from understudy.rollout.workers.pool import LoopWorkers
from understudy.serving.bind import bind_socket
from understudy.types.prompt import Prompt
from understudy.types.trajectory import StopReason
from understudy.weights.snapshots import Snapshots
from worker_tokens_process import PROMPT_TOKENS

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from hardware import cpu_name

WORKERS, AT_ONCE = 2, 8
ROUNDS, LONG, GOAL_MS = 5, 16384, 5.0
CASES = (("256 tokens", 256, 0), ("16k tokens", LONG, 0), ("16k tokens, 64 candidates each", LONG, 64))
TOKENIZER = Path(understudy.__file__).parent / "assets" / "quickstart" / "models" / "student"


class InstantEngine:
    """Answers every request at once with `max_new_tokens` prepared tokens."""

    version = 0

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        return [self._generation(request.sampling) for request in requests]

    def _generation(self, sampling: Sampling) -> Generation:
        new, k = sampling.max_new_tokens, sampling.candidates
        tokens = np.arange(new, dtype=np.int32) % 50_000
        ids = np.zeros((new, k), np.int32) if k else None
        return Generation(
            tokens, np.full(new, -0.123456, np.float32), np.zeros(new, np.int32), StopReason.LENGTH, ids
        )


def vllm_app() -> Starlette:
    """A server with vLLM's token route and prepared answers."""
    prepared: dict[tuple[int, int], bytes] = {}

    def answer(new: int, k: int) -> bytes:
        top = [{"token": f"token_id:{one}", "logprob": -1.234567 - one} for one in range(k)]
        content = [
            {"token": f"token_id:{one % 50_000}", "logprob": -0.123456, "top_logprobs": top}
            for one in range(new)
        ]
        choice = {
            "index": 0,
            "finish_reason": "length",
            "token_ids": [one % 50_000 for one in range(new)],
            "logprobs": {"content": content},
        }
        return json.dumps({"choices": [choice]}).encode()

    async def generate(http: Request) -> Response:
        wanted = json.loads(await http.body())["sampling_params"]
        case = (wanted["max_tokens"], wanted["logprobs"])
        if case not in prepared:
            prepared[case] = answer(*case)
        return Response(prepared[case], media_type="application/json")

    async def health(http: Request) -> Response:
        return Response(b"")

    return Starlette(
        routes=[Route("/inference/v1/generate", generate, methods=["POST"]), Route("/health", health)]
    )


def serve(kind: str, port_file: Path) -> None:
    """The main of the engine process."""
    app: Any = vllm_app()
    if kind == "engine process":
        engine: Any = InstantEngine()
        app = HostApp(engine, token=None, weights=None).asgi
    with bind_socket("127.0.0.1:0", None) as sock:
        port_file.with_suffix(".tmp").write_text(str(sock.getsockname()[1]))
        port_file.with_suffix(".tmp").replace(port_file)
        uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_keep_alive=600)).run([sock])


@asynccontextmanager
async def engine_of(kind: str, folder: Path) -> Any:
    port_file = folder / f"{kind.replace(' ', '-')}-port"
    child = subprocess.Popen([sys.executable, __file__, "--serve", kind, "--port-file", str(port_file)])
    try:
        while not port_file.exists():
            await asyncio.sleep(0.05)
        endpoint = Endpoint(f"http://127.0.0.1:{port_file.read_text()}")
        engine: Engine
        if kind == "engine process":

            async def stop(name: str) -> None:
                child.terminate()

            processes: Any = SimpleNamespace(stop=stop, alive=lambda name: child.poll() is None)
            engine = HostedEngine(
                [endpoint], processes, WeightDelivery(Snapshots(0)), batching=Batching.CONTINUOUS, version=0
            )
        else:
            engine = RemoteEngine(
                DIALECTS["vllm"], [endpoint], model="student", max_length=1 << 20, version=0
            )
        yield engine
        await engine.close()
    finally:
        child.terminate()
        child.wait()


@asynccontextmanager
async def remote_workers() -> Any:
    children: dict[int, subprocess.Popen[bytes]] = {}

    async def launch(number: int, address: str) -> int:
        words = [
            sys.executable,
            str(Path(__file__).with_name("worker_tokens_process.py")),
            "--call",
            address,
            "--number",
            str(number),
        ]
        children[number] = subprocess.Popen(words)
        return children[number].pid

    async def dismiss(number: int) -> None:
        children[number].terminate()
        children[number].wait()

    listener = WorkerListener(launch, dismiss, lambda number: children[number].poll() is None, "")
    await listener.listen("127.0.0.1")
    segments: Any = SimpleNamespace(take=lambda writer: SimpleNamespace(number=1), end=lambda writer: None)
    workers = LoopWorkers(
        WORKERS,
        tokenizer=TOKENIZER,
        agent="worker_tokens_process:OneTurn",
        context=1 << 20,
        open_line=listener.open,
        segments=segments,
    )
    try:
        await workers.start()
        yield workers
    finally:
        await workers.close()
        await listener.close()


async def measure(
    workers: LoopWorkers, engine: Any, new: int, candidates: int, count: int
) -> tuple[float, float]:
    """(ms of this process's CPU, bytes) per generation."""
    sampling = Sampling(new, candidates=candidates)
    renderer = Renderer(AutoTokenizer.from_pretrained(TOKENIZER), context=1 << 20)
    free = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        key = f"00000-{number:07}"

        async def generate(
            tokens: np.ndarray, sampling: Sampling, turn: int, media: Sequence[str] | None = None
        ) -> Generation:
            request = GenerateRequest(f"{key}/{turn}", tokens, sampling, number, session=key)
            (written,) = await engine.generate([request])
            return written

        prompt = Prompt(key, number, 0, "benchmark", text="")
        context = LoopContext(generate, renderer, sampling, key, 0, 1 << 20)
        async with free:
            answer = await workers.run_and_store(prompt, context)
        assert int(answer.body) == PROMPT_TOKENS + new

    async def some(numbers: range) -> None:
        await asyncio.gather(*map(one, numbers))

    def passed() -> int:
        return int(engine.traffic.sent + engine.traffic.received + workers.traffic.generation)

    await some(range(AT_ONCE))  # connections, prepared answers
    before, least = passed(), math.inf
    for _ in range(ROUNDS):  # the least of several rounds: other work on the machine only adds to it
        began = time.process_time()
        await some(range(count))
        least = min(least, 1000 * (time.process_time() - began) / count)
    return least, (passed() - before) / count / ROUNDS


def row(name: str, value: float, unit: str, goal: float | None = None) -> dict[str, Any]:
    return {
        "name": name,
        "value": round(value, 3),
        "unit": unit,
        "peer": None,
        "peer_value": None,
        "ratio": None,
        "goal": None if goal is None else f"<= {goal:g} {unit}",
        "met": None if goal is None else value <= goal,
    }


async def main(quick: bool) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        async with remote_workers() as workers:
            for kind in ("engine process", "vLLM"):
                async with engine_of(kind, Path(folder)) as engine:
                    for name, new, candidates in CASES:
                        if candidates and kind == "vLLM":
                            continue
                        count = 16 if quick else 32
                        ms, size = await measure(workers, engine, new, candidates, count)
                        what = f"one generation, {name}, {kind}"
                        goal = GOAL_MS if new == LONG and not candidates else None
                        rows.append(row(f"{what}: trainer's CPU", ms, "ms", goal))
                        rows.append(row(f"{what}: bytes through the trainer", size, "bytes"))
                        print(what, ms, size, flush=True)
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--serve")
    parser.add_argument("--port-file", type=Path)
    arguments = parser.parse_args()
    if arguments.serve:
        with suppress(KeyboardInterrupt):
            serve(arguments.serve, arguments.port_file)
        sys.exit()
    found = asyncio.run(main(arguments.quick))
    print(json.dumps(found, indent=1))
    if not arguments.quick:
        file = Path(__file__).parents[1] / "results" / f"worker_tokens-{cpu_name()}-{date.today()}.json"
        file.write_text(json.dumps(found, indent=1) + "\n")
