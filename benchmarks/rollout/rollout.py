"""Generation through our engines beside their peers, in one run on one machine.

    python benchmarks/rollout/rollout.py                              on a GPU: everything, about four minutes
    python benchmarks/rollout/rollout.py --parts hf                   hf | vllm | publish, or several with commas
    python benchmarks/rollout/rollout.py --tiny --parts hf            the same paths on a CPU with a tiny model, to try them

Random bf16 weights in Qwen3-0.6B's shape (publish: 8B's), 256 prompts of 128 tokens, temperature 1, no stop
tokens.

    hf        our in-process engine, and transformers' generate with the same model, batch and prompts
    vllm      bare: 256 requests straight to a vLLM server's own token route over one HTTP client, replies only decoded.
              ours: 256 rollouts through agent loop, `VLLMEngine`, checks and transcripts on the same server. Alternating
              rounds; the sampled token's logprob is asked for in both.
    publish   new weights to a vLLM server on the same GPU, from `update_weights` called to returned, and a plain
              device-to-device copy of as many bytes

vLLM runs in the interpreter named by UNDERSTUDY_VLLM_PYTHON (this one, when not set). Every finished row is
printed and written at once to benchmarks/results/rollout-<hardware>-<date>.json.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from rollout_models import CONTEXT, SHAPES, TINY, build_model, write_model
from rollout_results import Results
from understudy.cluster.local import LocalProcesses
from understudy.engines.base import GenerateRequest, Generation, Sampling
from understudy.engines.local.engine import HFEngine
from understudy.engines.local.scheduler import Batching
from understudy.engines.servers.dialects import DIALECTS, PieceRequest
from understudy.engines.servers.gpu_handover import GpuHandover
from understudy.engines.servers.vllm import VLLMEngine, VLLMSettings, start_vllm
from understudy.rollout.agents.agent import LoopContext
from understudy.rollout.agents.single_turn import SingleTurn
from understudy.types.prompt import Prompt

GOALS = {"hf": 5.0, "vllm": 0.95, "publish": 0.5}


@dataclass
class Scale:
    """Sizes of the measurement."""

    rows: int = 256
    prompt: int = 128
    new: int = 512
    peer_new: int = 128
    """transformers' generate is slow: fewer tokens suffice to measure its speed."""
    rounds: int = 3
    shape: dict[str, int] = field(default_factory=lambda: SHAPES["0.6b"])
    publish_shape: dict[str, int] = field(default_factory=lambda: SHAPES["8b"])
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16


def prompts_of(scale: Scale) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [
        rng.integers(32, scale.shape["vocab_size"], scale.prompt).astype(np.int32) for _ in range(scale.rows)
    ]


def synchronize(scale: Scale) -> None:
    if scale.device == "cuda":
        torch.cuda.synchronize()


# --- hf --------------------------------------------------------------------------------------------------------------


async def run_hf(scale: Scale, results: Results, folder: Path) -> None:
    model = build_model(scale.shape, scale.device, scale.dtype).eval()
    prompts = prompts_of(scale)
    peer = _transformers_rate(model, prompts, scale)
    results.add("transformers generate", peer, "tok/s", note=f"batch {scale.rows}, {scale.peer_new} new")
    for batching in (Batching.COMPOSED, Batching.CONTINUOUS):
        engine = HFEngine(
            model, max_batch=scale.rows, device=scale.device, pad_id=0, max_length=scale.prompt + scale.new,
            batching=batching, version=0,
        )  # fmt: skip
        try:
            await engine.generate(_requests(prompts, 8))  # compiles kernels, records graphs
            rates = []
            for _ in range(2):
                start = time.perf_counter()
                if batching is Batching.COMPOSED:
                    done = await engine.generate(_requests(prompts, scale.new))
                else:  # one call per rollout, as rollouts arrive
                    calls = [engine.generate([request]) for request in _requests(prompts, scale.new)]
                    done = [generation for (generation,) in await asyncio.gather(*calls)]
                rates.append(sum(len(one.tokens) for one in done) / (time.perf_counter() - start))
            note = f"batch {scale.rows}, {scale.new} new"
            results.add(f"hf engine, {batching}", max(rates), "tok/s", peer="transformers generate", peer_value=peer,
                        goal=GOALS["hf"], note=note)  # fmt: skip
        finally:
            await engine.close()


def _transformers_rate(model: Any, prompts: Sequence[np.ndarray], scale: Scale) -> float:
    ids = torch.from_numpy(np.stack(prompts)).long().to(scale.device)

    def run(new: int) -> float:
        synchronize(scale)
        start = time.perf_counter()
        with torch.inference_mode():
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new,
                           do_sample=True, top_k=0, pad_token_id=0)  # fmt: skip
        synchronize(scale)
        return scale.rows * new / (time.perf_counter() - start)

    run(4)
    return run(scale.peer_new)


def _requests(prompts: Sequence[np.ndarray], new: int) -> list[GenerateRequest]:
    return [GenerateRequest(str(i), tokens, Sampling(new), seed=i) for i, tokens in enumerate(prompts)]


# --- vllm ------------------------------------------------------------------------------------------------------------


async def open_vllm(
    stack: AsyncExitStack,
    scale: Scale,
    folder: Path,
    shape: dict[str, int],
    options: Sequence[str],
    **engine: Any,
) -> VLLMEngine:
    write_model(folder / "student", shape, scale.device, scale.dtype)
    processes = LocalProcesses(folder / "logs", start_timeout=300)
    stack.push_async_callback(processes.close)
    env: dict[str, str] = {}
    if scale.device == "cpu":
        env = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        options = [*options, "--enforce-eager"]
    python = os.environ.get("UNDERSTUDY_VLLM_PYTHON", sys.executable)
    dtype = str(scale.dtype).removeprefix("torch.")
    settings = VLLMSettings(
        python, str(folder / "student"), CONTEXT, scale.rows, dtype, tuple(options), (env,)
    )
    start = time.perf_counter()
    try:
        opened = await start_vllm(settings, processes, version=0, timeout_s=60, **engine)
    except Exception:
        for log in (folder / "logs").glob("*.log"):
            print(log.read_text(errors="replace")[-3000:], flush=True)
        raise
    stack.push_async_callback(opened.close)
    print(f"vLLM up after {time.perf_counter() - start:.0f} s", flush=True)
    return opened


class _NoText:
    """Stands in for a renderer: prompts are ids already."""

    def __init__(self, prompts: Sequence[np.ndarray]) -> None:
        self._prompts = prompts

    def render(self, prompt: Prompt, *, tools: Any = None) -> np.ndarray:
        return self._prompts[prompt.ordinal]


async def run_vllm(scale: Scale, results: Results, folder: Path) -> None:
    prompts, share = prompts_of(scale), ["--gpu-memory-utilization=0.5"] if scale.device == "cuda" else []
    async with AsyncExitStack() as stack:
        engine = await open_vllm(stack, scale, folder, scale.shape, share, seeded=False)
        (child,) = engine.children.values()
        transport = httpx.AsyncHTTPTransport(
            uds=child.ready["socket"], limits=httpx.Limits(max_connections=1024)
        )
        client = await stack.enter_async_context(
            httpx.AsyncClient(base_url="http://vllm", transport=transport, timeout=300)
        )
        bare_rates: list[float] = []
        our_rates: list[float] = []
        await _bare(client, prompts, 16)
        await _ours(engine, prompts, 16)
        for round_number in range(scale.rounds):
            sides: list[tuple[list[float], Callable[[], Awaitable[int]]]] = [
                (bare_rates, lambda: _bare(client, prompts, scale.new)),
                (our_rates, lambda: _ours(engine, prompts, scale.new)),
            ]
            for rates, side in sides if round_number % 2 == 0 else sides[::-1]:
                start = time.perf_counter()
                tokens = await side()
                rates.append(tokens / (time.perf_counter() - start))
            print(
                f"round {round_number}: bare {bare_rates[-1]:,.0f}, ours {our_rates[-1]:,.0f} tok/s",
                flush=True,
            )
        bare, ours = statistics.median(bare_rates), statistics.median(our_rates)
        note = f"{scale.rows} rollouts at once, {scale.new} new, median of {scale.rounds}"
        start = time.perf_counter()
        tokens = await _bare(client, prompts, scale.new, seeded=True)
        seeded = tokens / (time.perf_counter() - start)
        results.add(
            "bare vLLM, seeds", seeded, "tok/s", note="why requests carry none: one round with a seed each"
        )
        results.add("bare vLLM", bare, "tok/s", note=note)
        results.add("vllm engine, whole rollout path", ours, "tok/s", peer="bare vLLM", peer_value=bare,
                    goal=GOALS["vllm"], note=note)  # fmt: skip


async def _bare(
    client: httpx.AsyncClient, prompts: Sequence[np.ndarray], new: int, *, seeded: bool = False
) -> int:
    """The server's own route with the request bodies that our engine sends; replies are only decoded and
    counted."""
    dialect = DIALECTS["vllm"]
    bodies = [
        dialect.body(PieceRequest(request, request.tokens, new, request.seed, "bare", "student"))
        for request in _requests(prompts, new)
    ]

    for body in bodies:
        if not seeded:
            del body["sampling_params"]["seed"]

    async def one(body: dict[str, Any]) -> int:
        reply = await client.post(dialect.generate, json=body)
        reply.raise_for_status()
        return len(reply.json()["choices"][0]["token_ids"])

    return sum(await asyncio.gather(*map(one, bodies)))


async def _ours(engine: VLLMEngine, prompts: Sequence[np.ndarray], new: int) -> int:
    loop, renderer = SingleTurn(), _NoText(prompts)

    async def one(i: int) -> int:
        prompt = Prompt(f"00000-{i:07d}", i, 0, "", text="")

        async def generate(tokens: np.ndarray, sampling: Sampling, turn: int) -> Generation:
            request = GenerateRequest(f"{prompt.key}/{turn}", tokens, sampling, seed=i, session=prompt.key)
            return (await engine.generate([request]))[0]

        context = LoopContext(generate, renderer, Sampling(new), prompt.key, 0, CONTEXT)  # type: ignore[arg-type]
        (trajectory,) = await loop.run(prompt, context)
        return int(trajectory.loss_mask.sum())

    return sum(await asyncio.gather(*map(one, range(len(prompts)))))


# --- publish ---------------------------------------------------------------------------------------------------------


async def run_publish(scale: Scale, results: Results, folder: Path) -> None:
    """From the trainer's tensors to the server's, on one GPU."""
    shape = scale.publish_shape
    share = ["--gpu-memory-utilization=0.35", "--enforce-eager"] if scale.device == "cuda" else []
    handover = GpuHandover()
    async with AsyncExitStack() as stack:
        engine = await open_vllm(
            stack, scale, folder / "publish", shape, [*share, "--load-format=dummy"], handover=handover
        )
        trained = build_model(shape, scale.device, scale.dtype)
        tensors = [(name, tensor.detach()) for name, tensor in trained.named_parameters()]
        size = sum(tensor.numel() * tensor.element_size() for _, tensor in tensors)
        copy_rate = _copy_rate(tensors, scale)
        results.add(
            "device-to-device copy",
            copy_rate / 1e9,
            "GB/s",
            note=f"{size / 1e9:.2f} GB in {len(tensors)} tensors",
        )
        seconds = []
        for version in range(1, 8):
            with torch.no_grad():
                tensors[0][1].add_(1e-3)  # an optimizer step changes them in place
            synchronize(scale)
            start = time.perf_counter()
            await engine.update_weights(version, tensors)
            seconds.append(time.perf_counter() - start)
            print(
                f"publish {version}: {seconds[-1] * 1e3:.1f} ms, {size / seconds[-1] / 1e9:,.0f} GB/s, "
                f"of it the copy itself {handover.copy_seconds * 1e3:.1f} ms",
                flush=True,
            )
        await _check_published(engine, trained, scale)
        results.add(
            "publish to vLLM, first",
            size / seconds[0] / 1e9,
            "GB/s",
            note="tensors are mapped, the loader is watched",
        )
        results.add("publish to vLLM", size / statistics.median(seconds[2:]) / 1e9, "GB/s", peer="device-to-device copy",
                    peer_value=copy_rate / 1e9, goal=GOALS["publish"], note=f"median of {len(seconds) - 2}")  # fmt: skip


def _copy_rate(tensors: Sequence[tuple[str, torch.Tensor]], scale: Scale) -> float:
    """Bytes a second of copying these tensors, one copy each, fastest of five."""
    targets = [torch.empty_like(tensor) for _, tensor in tensors]
    best = float("inf")
    for _ in range(5):
        synchronize(scale)
        start = time.perf_counter()
        for target, (_, tensor) in zip(targets, tensors, strict=True):
            target.copy_(tensor)
        synchronize(scale)
        best = min(best, time.perf_counter() - start)
    return sum(target.numel() * target.element_size() for target in targets) / best


async def _check_published(engine: VLLMEngine, trained: Any, scale: Scale) -> None:
    """Checks that the server generates with the published weights, not with those it started with."""
    prompt = np.arange(40, 72, dtype=np.int32)
    (generation,) = await engine.generate([GenerateRequest("check", prompt, Sampling(16), seed=1)])
    ids = torch.tensor([[*prompt.tolist(), *generation.tokens.tolist()]], device=scale.device)
    with torch.inference_mode():
        logprobs = trained(input_ids=ids).logits[0].float().log_softmax(-1)
    ours = logprobs[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])[:, 0].cpu().numpy()
    worst = float(np.abs(ours - generation.logprobs).max())
    print(f"published weights: logprobs of server and trainer differ by {worst:.3f} at most", flush=True)
    if worst > 0.5:
        raise AssertionError(
            f"the server does not write with the published weights: logprobs differ by {worst:.3f}"
        )


PARTS: dict[str, Callable[[Scale, Results, Path], Coroutine[Any, Any, None]]] = {
    "hf": run_hf,
    "vllm": run_vllm,
    "publish": run_publish,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parts", default=",".join(PARTS), help="hf, vllm, publish; several with commas")
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny model on the CPU: tries the paths, measures nothing"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results")
    parser.add_argument("--new", type=int, help="tokens per rollout")
    options = parser.parse_args()
    tiny = Scale(8, 8, 12, 4, 2, TINY, TINY, "cpu", torch.float32)
    scale = tiny if options.tiny else Scale()
    if options.new:
        scale.new = options.new
    hardware = platform.machine() + "-tiny" if options.tiny else torch.cuda.get_device_name()
    results = Results(options.out, hardware)
    print(json.dumps({key: str(value) for key, value in asdict(scale).items()}), flush=True)
    failed = []
    for part in options.parts.split(","):
        start = time.perf_counter()
        try:
            with tempfile.TemporaryDirectory(prefix="understudy-rollout-") as folder:
                asyncio.run(PARTS[part](scale, results, Path(folder)))
        except Exception:  # continue with the other parts
            traceback.print_exc()
            failed.append(part)
        print(f"--- {part}: {time.perf_counter() - start:.0f} s", flush=True)
        gc.collect()
        if scale.device == "cuda":
            torch.cuda.empty_cache()
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
