"""Teacher scoring beside its peers, in one run on one machine.

    python benchmarks/scoring.py                      on a GPU: 0.6B and 4B shapes, everything; about 8 minutes
    python benchmarks/scoring.py --shapes 0.6b --systems ours
    python benchmarks/scoring.py --head               the head alone, step by step, on a GPU; half a minute
    python benchmarks/scoring.py --cpu                two replicas against one, and the client's own cost, on CPU processes

Random bf16 weights in Qwen3's shapes. Every system gets the same token ids; each runs in processes of its
own and leaves the GPU before the next one starts. Ours is timed at the client, with scores delivered and
checked. Correctness comes first: our scores against a float32 forward of the same weights, and vLLM's too if
vLLM can be imported.

    ours              a replica process, compiled layers, requests of 8 sequences, 8 in flight, top-K delivered over HTTP
    vLLM dict, flat   prompt_logprobs=K in process, with and without flat_logprobs, no detokenising
    vLLM bare         the same prefill without any logprobs: the cost of its forward alone
    transformers      batched forward, fp32 log_softmax, topk

vLLM is that of UNDERSTUDY_VLLM_PYTHON (this interpreter, when not set).

Results go to benchmarks/results/scoring-<hardware>-<date>.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from understudy.teacher.clients.native import ReplicaClient
from understudy.teacher.scoring import head_kernel
from understudy.teacher.scoring.head import Head, score_rows
from understudy.types.scores import ScoreItem, Signal

TOKEN = "benchmark"
VOCAB = 151_936
SHAPES: dict[str, dict[str, int]] = {
    "0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "4b": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
}
TINY = {"hidden_size": 96, "intermediate_size": 288, "num_hidden_layers": 3, "num_attention_heads": 4}
GOALS = {"4b": {"bare": 0.95, "dict": 10.0, "flat": 2.0}, "0.6b": {"bare": 1.0, "dict": 10.0, "flat": 2.0}}
SYSTEMS = ("ours", "vllm", "transformers")
PER_REQUEST = 8
IN_FLIGHT = 8


@dataclass
class Row:
    name: str
    value: float
    unit: str
    peer: str = ""
    peer_value: float | None = None
    ratio: float | None = None
    goal: float | None = None
    met: bool | None = None
    note: str = ""


def write_model(folder: Path, shape: dict[str, int], vocab: int, device: str, dtype: torch.dtype) -> None:
    """Random weights and an unused tokenizer, in a Hugging Face folder."""
    head_dim = 128 if vocab == VOCAB else 24
    kv_heads = 8 if vocab == VOCAB else 4
    config = Qwen3Config(
        vocab_size=vocab,
        head_dim=head_dim,
        num_key_value_heads=kv_heads,
        max_position_embeddings=40_960,
        tie_word_embeddings=True,
        **shape,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3ForCausalLM(config).to(dtype)
    model.save_pretrained(folder)
    tokenizer = {"model": {"type": "WordLevel", "vocab": {f"t{i}": i for i in range(32)}, "unk_token": "t0"}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "t2"}))


def sequences(workload: str, count: int, vocab: int) -> list[np.ndarray]:
    """`2047`: as named. `mixed`: 128 … 8192, as many short as long ones on a log scale."""
    rng = np.random.default_rng(7)
    lengths = [2047] * count
    if workload == "mixed":
        lengths = np.exp(rng.uniform(np.log(128), np.log(8192), count)).astype(int).tolist()
    elif workload != "2047":
        lengths = [int(workload)] * count
    return [rng.integers(32, vocab, length).astype(np.int32) for length in lengths]


def items_of(rows: Sequence[np.ndarray], k: int, scored: float) -> list[ScoreItem]:
    """`scored` is the share of each sequence, counted from its end, whose tokens are scored."""
    items = []
    for i, tokens in enumerate(rows):
        first = max(1, round(len(tokens) * (1 - scored)))
        positions = np.arange(first, len(tokens), dtype=np.int32)
        items.append(ScoreItem(str(i), tokens, positions, Signal.TOPK if k else Signal.SAMPLED, k))
    return items


@contextlib.contextmanager
def replica(folder: Path, options: Sequence[str], threads: int = 1) -> Iterator[tuple[str, float]]:
    """A real replica process; yields its URL and the seconds it took to be ready."""
    with tempfile.TemporaryDirectory() as place:
        ready = Path(place) / "ready.json"
        command = [
            sys.executable,
            "-m",
            "understudy.teacher.replica.server",
            "--model",
            str(folder),
            "--name",
            "bench",
        ]
        command += ["--ready-file", str(ready), "--max-k", "1024", *options]
        env = {**os.environ, "UNDERSTUDY_TOKEN": TOKEN, "OMP_NUM_THREADS": str(threads)}
        began = time.perf_counter()
        process = subprocess.Popen(command, env=env)
        try:
            while not ready.exists():
                if process.poll() is not None:
                    raise SystemExit(f"the replica ended with {process.returncode}")
                time.sleep(0.05)
            yield json.loads(ready.read_text())["url"], time.perf_counter() - began
        finally:
            process.terminate()
            process.wait(60)


async def deliver(urls: Sequence[str], items: Sequence[ScoreItem], in_flight: int) -> tuple[float, float]:
    """(seconds, this process's CPU seconds) to have every item's scores here, checked."""
    clients = [ReplicaClient(url, TOKEN, teacher="bench") for url in urls]
    requests = [items[i : i + PER_REQUEST] for i in range(0, len(items), PER_REQUEST)]
    gates = [asyncio.Semaphore(in_flight) for _ in clients]

    async def one(number: int) -> None:
        async with gates[number % len(clients)]:
            await clients[number % len(clients)].score(requests[number])

    for client in clients:
        await client.manifest()
    began, began_cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(one(number) for number in range(len(requests))))
    took = time.perf_counter() - began, time.process_time() - began_cpu
    for client in clients:
        await client.close()
    return took


def tokens_in(items: Sequence[ScoreItem]) -> int:
    return sum(len(item.tokens) for item in items)


def ours(folder: Path, shape: str, options: Sequence[str], scale: float) -> dict[str, Any]:
    """Tokens per second delivered, per workload; and the scores of a few sequences for the correctness check."""
    gpu = ["--device", "cuda", "--dtype", "bfloat16", "--compile", "--batching", "by_arrival", *options]
    found: dict[str, Any] = {}
    with replica(folder, gpu) as (url, ready_after):
        found["ready_after"] = ready_after
        found["scores"] = asyncio.run(scores_of(url, items_of(sequences("2047", 2, VOCAB), 64, 1.0)))
        for workload in ("2047", "mixed"):
            rows = sequences(workload, max(8, int(scale * (128 if shape == "0.6b" else 48))), VOCAB)
            for k, scored in ((0, 1.0), (64, 1.0), (64, 0.5)):
                items = items_of(rows, k, scored)
                asyncio.run(deliver([url], items[: 2 * PER_REQUEST], IN_FLIGHT))
                took = [asyncio.run(deliver([url], items, IN_FLIGHT)) for _ in range(3)]
                seconds, cpu = min(took)
                name = f"{workload} K={k} scored={scored:g}"
                found[name] = {
                    "tokens_per_second": tokens_in(items) / seconds,
                    "client_us": 1e6 * cpu / tokens_in(items),
                }
    return found


async def scores_of(url: str, items: Sequence[ScoreItem]) -> list[list[list[float]]]:
    async with ReplicaClient(url, TOKEN, teacher="bench") as client:
        scores = await client.score(items)
    return [
        [s.sampled_logprobs.tolist(), s.logprobs[:, 0].tolist()] for s in scores if s.logprobs is not None
    ]


def transformers_child(folder: Path, shape: str, scale: float) -> dict[str, Any]:
    """The plain path, and the float32 reference for the correctness check."""
    found: dict[str, Any] = {}
    with torch.inference_mode():
        exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda().eval()
        found["truth"] = []
        for tokens in sequences("2047", 2, VOCAB):
            ids = torch.from_numpy(tokens.astype(np.int64)).cuda()
            logprobs = exact(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
            found["truth"].append(
                [logprobs.gather(1, ids[1:, None])[:, 0].tolist(), logprobs.max(-1).values.tolist()]
            )
        del exact, logprobs
        torch.cuda.empty_cache()
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda().eval()
        rows = sequences("2047", max(8, int(scale * 32)), VOCAB)
        batches = [
            torch.from_numpy(np.stack(rows[i : i + 4]).astype(np.int64)).cuda()
            for i in range(0, len(rows), 4)
        ]

        def run(ids: torch.Tensor) -> tuple[Any, torch.Tensor]:
            logprobs = model(input_ids=ids).logits[:, :-1].float().log_softmax(-1)
            own = logprobs.gather(2, ids[:, 1:, None])
            return [best.cpu() for best in logprobs.topk(64)], own.cpu()

        run(batches[0])
        torch.cuda.synchronize()
        began = time.perf_counter()
        for ids in batches:
            run(ids)
        found["2047 K=64"] = sum(ids.numel() for ids in batches) / (time.perf_counter() - began)
    return found


def vllm_child(folder: Path, shape: str, scale: float) -> dict[str, Any]:
    from vllm import LLM, SamplingParams  # noqa: PLC0415  a peer: imported only in a process of its own

    engine = LLM(
        str(folder),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=8448,
        max_logprobs=64,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.6,
        max_num_batched_tokens=16384,
    )
    found: dict[str, Any] = {}

    def timed(rows: Sequence[np.ndarray], **sampling: Any) -> tuple[float, list[Any]]:
        parameters = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, **sampling)
        prompts = [{"prompt_token_ids": tokens.tolist()} for tokens in rows]
        began = time.perf_counter()
        answers = engine.generate(prompts, parameters, use_tqdm=False)
        return sum(map(len, rows)) / (time.perf_counter() - began), answers

    count = max(8, int(scale * (128 if shape == "0.6b" else 48)))
    for workload in ("2047", "mixed"):
        rows = sequences(workload, count, VOCAB)
        timed(rows[:8])
        found[f"{workload} bare"] = max(timed(rows)[0] for _ in range(3))
        few = rows[:8]
        timed(few[:2], prompt_logprobs=64)
        found[f"{workload} dict"] = timed(few, prompt_logprobs=64)[0]
        try:
            timed(few[:2], prompt_logprobs=64, flat_logprobs=True)
            found[f"{workload} flat"] = max(
                timed(rows[:32], prompt_logprobs=64, flat_logprobs=True)[0] for _ in range(2)
            )
        except TypeError:
            print("this vLLM has no flat logprobs", file=sys.stderr)
    few = sequences("2047", 2, VOCAB)
    answers = timed(few, prompt_logprobs=1)[1]
    found["scores"] = [
        [
            [entry[int(t)].logprob for entry, t in zip(answer.prompt_logprobs[1:], tokens[1:], strict=True)],
            [max(e.logprob for e in entry.values()) for entry in answer.prompt_logprobs[1:]],
        ]
        for answer, tokens in zip(answers, few, strict=True)
    ]
    return found


CHILDREN = {"transformers": transformers_child, "vllm": vllm_child}


def _python_of(system: str) -> str:
    return os.environ.get("UNDERSTUDY_VLLM_PYTHON", sys.executable) if system == "vllm" else sys.executable


def has_vllm() -> bool:
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    return subprocess.run([_python_of("vllm"), "-c", code], check=False).returncode == 0


def in_child(system: str, folder: Path, shape: str, scale: float) -> dict[str, Any]:
    """Runs one peer in a child process, which frees the GPU when it ends."""
    with tempfile.TemporaryDirectory() as place:
        answer = Path(place) / "answer.json"
        command = [
            _python_of(system),
            __file__,
            "--child",
            system,
            "--folder",
            str(folder),
            "--shapes",
            shape,
        ]
        done = subprocess.run([*command, "--scale", str(scale), "--answer", str(answer)], check=False)
        if done.returncode != 0:
            print(f"{system} failed with {done.returncode}", file=sys.stderr)
            return {}
        return json.loads(answer.read_text())


def error_rows(shape: str, truth: list[Any], name: str, scores: list[Any]) -> list[Row]:
    """bf16 against float32 of the same rounded weights, so all error is rounding."""
    own = np.abs(np.array([s[0] for s in scores]) - np.array([t[0] for t in truth]))
    best = np.abs(np.array([s[1] for s in scores]) - np.array([t[1] for t in truth]))
    return [
        Row(
            f"{shape} {name} error, scored token, mean",
            float(own.mean()),
            "nats",
            goal=0.02,
            met=bool(own.mean() < 0.02),
        ),
        Row(
            f"{shape} {name} error, scored token, worst",
            float(own.max()),
            "nats",
            goal=0.2,
            met=bool(own.max() < 0.2),
        ),
        Row(
            f"{shape} {name} error, best candidate, worst",
            float(best.max()),
            "nats",
            goal=0.2,
            met=bool(best.max() < 0.2),
        ),
    ]


def benchmark_shape(shape: str, systems: Sequence[str], options: Sequence[str], scale: float) -> list[Row]:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / shape
        write_model(folder, SHAPES[shape], VOCAB, "cuda", torch.bfloat16)
        torch.cuda.empty_cache()
        peers = {name: in_child(name, folder, shape, scale) for name in CHILDREN if name in systems}
        mine = ours(folder, shape, options, scale) if "ours" in systems else {}
    truth = peers.get("transformers", {}).get("truth")
    if truth:
        for name, found in (("ours", mine), ("vLLM", peers.get("vllm", {}))):
            if "scores" in found:
                rows += error_rows(shape, truth, name, found["scores"])
    if mine:
        rows.append(
            Row(f"{shape} ours, ready after", mine["ready_after"], "s", note="load, digest, warm-up, compile")
        )
    plain = peers.get("transformers", {}).get("2047 K=64")
    for name, value in mine.items():
        if not isinstance(value, dict):
            continue
        speed, workload = value["tokens_per_second"], name.split()[0]
        rows.append(
            Row(
                f"{shape} {name} delivered",
                speed,
                "tok/s",
                note=f"client CPU {value['client_us']:.2f} µs/token",
            )
        )
        if "K=64" in name:
            rows += beside(shape, name, speed, workload, peers.get("vllm", {}))
            if plain and workload == "2047":
                rows.append(
                    Row(f"{shape} {name} delivered", speed, "tok/s", "transformers", plain, speed / plain)
                )
    return rows


def beside(shape: str, name: str, speed: float, workload: str, peer: dict[str, Any]) -> list[Row]:
    rows = []
    for path in ("bare", "dict", "flat"):
        value = peer.get(f"{workload} {path}")
        if value:
            goal = GOALS[shape][path] if workload == "2047" or path == "bare" else None
            met = None if goal is None else speed / value >= goal
            rows.append(
                Row(
                    f"{shape} {name} delivered",
                    speed,
                    "tok/s",
                    f"vLLM {path}",
                    value,
                    speed / value,
                    goal,
                    met,
                )
            )
    return rows


def benchmark_cpu() -> list[Row]:
    """Two replica processes against one, and the client's cost per scored token."""
    rows = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "tiny"
        write_model(folder, TINY, 42 * 24, "cpu", torch.float32)
        options = ["--dtype", "float32", "--threads", "1"]
        with replica(folder, options) as (first, _), replica(folder, options) as (second, _):
            # Short sequences cost the client most per token; on two cores it competes with the replicas.
            for length, count in ((64, 1024), (256, 256)):
                items = items_of(sequences(str(length), count, 42 * 24), 8, 0.5)
                speeds = {}
                for name, urls in (("one replica", [first]), ("two replicas", [first, second])):
                    asyncio.run(deliver(urls, items[: len(items) // 4], 4))
                    seconds, cpu = min(asyncio.run(deliver(urls, items, 4)) for _ in range(3))
                    speeds[name] = tokens_in(items) / seconds
                    cost = f"client CPU {1e6 * cpu / tokens_in(items):.2f} µs/token"
                    rows.append(
                        Row(f"cpu {length} tokens, {name}, 1 thread each", speeds[name], "tok/s", note=cost)
                    )
                two, one = speeds["two replicas"], speeds["one replica"]
                name = f"cpu {length} tokens, two replicas"
                rows.append(Row(name, two, "tok/s", "one replica", one, two / one, 1.8, two / one >= 1.8))
    return rows


def benchmark_head() -> list[Row]:
    """Milliseconds for 8192 scored positions: the unavoidable product, then the cost of reading its result."""
    rows = [Row("head kernels usable", float(head_kernel.usable(torch.device("cuda", 0))), "yes=1")]
    for name, hidden_size in (("0.6b", 1024), ("4b", 2560)):
        weight = torch.randn(VOCAB, hidden_size, device="cuda", dtype=torch.bfloat16) * 0.02
        hidden = torch.randn(8192, hidden_size, device="cuda", dtype=torch.bfloat16)
        scored = torch.randint(0, VOCAB, (8192,), device="cuda")
        head = Head(weight)
        logits = head.logits(hidden[:2816])
        maxima = head_kernel.row_summary(logits)[1]
        share = 8192 / len(logits)
        steps: dict[str, tuple[Callable[[], object], float]] = {
            "product, bf16": (partial(torch.matmul, hidden, weight.T), 1.0),
            "product, fp32 in 2 GiB chunks": (
                partial(_in_chunks, head, hidden),
                1.0,
            ),
            "logsumexp and block maxima": (partial(head_kernel.row_summary, logits), share),
            "torch.logsumexp": (partial(torch.logsumexp, logits, -1), share),
            "64 best from block maxima": (partial(head_kernel.row_best, logits, maxima, 64), share),
            "torch.topk 64": (partial(torch.topk, logits, 64), share),
        }
        for k in (0, 64):
            steps[f"whole head, K={k}"] = (
                partial(score_rows, head, hidden, scored, topk=k, chunk_bytes=2 << 30),
                1.0,
            )
        for step, (run, times) in steps.items():
            rows.append(Row(f"{name} head, {step}", times * milliseconds(run), "ms"))
    return rows


def _in_chunks(head: Head, hidden: torch.Tensor) -> list[torch.Tensor]:
    return [head.logits(part) for part in hidden.split(3533)]


def milliseconds(run: Callable[[], object]) -> float:
    """The median of ten, by the device's own clock."""
    for _ in range(3):
        run()
    times = []
    for _ in range(10):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        run()
        ended.record()
        torch.cuda.synchronize()
        times.append(began.elapsed_time(ended))
    return sorted(times)[5]


def save(rows: Sequence[Row], out: Path, kind: str = "scoring") -> None:
    for row in rows:
        beside_it = (
            f" | {row.peer} {row.peer_value:,.6g} → {row.ratio:.2f}×" if row.peer_value and row.ratio else ""
        )
        verdict = "" if row.met is None else f" | goal {row.goal:g}: {'met' if row.met else 'MISSED'}"
        print(f"{row.name:48} {row.value:>12,.6g} {row.unit}{beside_it}{verdict}  {row.note}")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    slug = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    out.mkdir(parents=True, exist_ok=True)
    target = out / f"{kind}-{slug}-{time.strftime('%Y-%m-%d')}.json"
    content = {"hardware": gpu, "torch": torch.__version__, "rows": [asdict(row) for row in rows]}
    target.write_text(json.dumps(content, indent=1) + "\n")
    print(f"written to {target}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument(
        "--scale", type=float, default=1.0, help="how many sequences, relative to the full run"
    )
    parser.add_argument("--server", default="", help="further options of our replica, in one string")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--head", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--child", choices=CHILDREN, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        args.answer.write_text(json.dumps(CHILDREN[args.child](args.folder, args.shapes[0], args.scale)))
        return
    if args.cpu:
        save(benchmark_cpu(), args.out, "scoring-cpu")
        return
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device; --cpu measures what a CPU can show")
    if args.head:
        save(benchmark_head(), args.out, "scoring-head")
        return
    systems = [name for name in args.systems if name != "vllm" or has_vllm()]
    if "vllm" in args.systems and "vllm" not in systems:
        print(f"{_python_of('vllm')} has no vllm, which is left out")
    rows: list[Row] = []
    for shape in args.shapes:
        rows += benchmark_shape(shape, systems, args.server.split(), args.scale)
        save(rows, args.out)


if __name__ == "__main__":
    main()
