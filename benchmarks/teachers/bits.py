"""A teacher with eight-bit weights beside the same teacher without: distance in nats, bytes, and tokens per second.

    python benchmarks/teachers/bits.py MODEL TEXT.jsonl                        int8 beside float32 on a CPU
    python benchmarks/teachers/bits.py MODEL TEXT.jsonl --device cuda --dtype bfloat16 --bits fp8 int8

TEXT.jsonl: rows with `question` and `answer`. Their text, one after the other, is cut into rows of `--length` tokens. Both teachers score the same request through the
replica's scorer; they take turns, and the median of the rounds counts. Distances are over the whole vocabulary.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer

from understudy.teacher.protocol import request_of
from understudy.teacher.replica.assemble import CPU_CHUNK_MIB, CUDA_CHUNK_MIB
from understudy.teacher.scoring.eight_bits import Bits
from understudy.teacher.scoring.model import FrozenModel, load_frozen
from understudy.teacher.scoring.quantize import quantized
from understudy.teacher.scoring.scorer import Scorer, ScorerOptions
from understudy.teacher.scoring.warm_up import warm_up
from understudy.types.scores import ScoreItem, Signal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from hardware import cpu_name
from step_problem import Row, save

SPEED_GOAL, MEMORY_GOAL = 1.3, 0.50
"""Of the bytes two places are compared: a scale per row of a matrix is 0.0006 of them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("--bits", nargs="+", default=["int8"], choices=[str(one) for one in Bits])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--label", default="", help="of the model in the result file; its folder's name when not set"
    )
    parser.add_argument("--result", default="teacher_bits", help="beginning of the result file's name")
    parser.add_argument("--out", type=Path, help="folder of the result file")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    lines = [json.loads(line) for line in options.text.read_text().splitlines()]
    text = "\n\n".join(f"{one['question']}\n{one['answer']}" for one in lines)
    stream = np.array(tokenizer(text)["input_ids"], np.int32)
    # Rows of one length, so that all forwards of a request are full: a last one of a few rows costs as much as a whole one.
    tokens = [
        stream[at : at + options.length] for at in range(0, len(stream) - options.length + 1, options.length)
    ][: options.rows]
    where = torch.cuda.get_device_name().replace(" ", "-").lower() if options.device != "cpu" else cpu_name()
    rows: list[Row] = []
    for bits in options.bits:
        found = compared(Bits(bits), tokens, options)
        for row in found:
            print(
                f"{row.name:<60} {row.value} {row.unit} {row.goal} {'' if row.met is None else row.met}",
                flush=True,
            )
        rows += found
        save(
            options.result, where, rows, options.out
        )  # after each kind, so that an interrupted run keeps the first


def compared(bits: Bits, tokens: list[np.ndarray], options: argparse.Namespace) -> list[Row]:
    full = load_frozen(options.model, dtype=options.dtype, device=options.device)
    host = load_frozen(options.model, dtype=options.dtype)
    small, fixed = quantized(host, bits, options.device, float("inf"))
    # Before the scorers change the attention of both models to a packed one, which a plain forward cannot call.
    kl_N, apart_N = distances(full, small, tokens)
    items = [
        ScoreItem(f"row-{i}", row, np.arange(1, len(row), dtype=np.int32), Signal.TOPK, k=32)
        for i, row in enumerate(tokens)
    ]
    request, count = request_of(items), sum(len(row) for row in tokens)
    # A replica on a GPU compiles its layers: the conversion to eight bits is then part of the kernel before it.
    on_gpu = options.device != "cpu"
    chunk = (CUDA_CHUNK_MIB if on_gpu else CPU_CHUNK_MIB) << 20
    settings = ScorerOptions(compile_layers=on_gpu, chunk_bytes=chunk)
    scorers = [Scorer("full", full, settings), Scorer("bits", small, settings)]
    for scorer in scorers:
        warm_up(scorer)
        scorer.score(request)
    seconds: list[list[float]] = [[], []]
    for _ in range(options.rounds):
        for place, scorer in enumerate(scorers):
            begun = time.perf_counter()
            scorer.score(request)  # returns arrays on the host
            seconds[place].append(time.perf_counter() - begun)
    rates = [count / statistics.median(one) for one in seconds]
    name, peer = f"{options.label or Path(options.model).name}, {bits}", f"{options.dtype} weights"
    weights = [bytes_of(one) for one in (small, full)]
    speed, memory = rates[1] / rates[0], weights[0] / weights[1]
    return [
        Row(f"{name}: scoring", round(rates[1], 1), "tokens/s", peer, round(rates[0], 1), round(speed, 3),
            f">= {SPEED_GOAL} x", speed >= SPEED_GOAL),
        Row(f"{name}: weights, head and embedding included", weights[0], "bytes", peer, weights[1], round(memory, 4),
            f"<= {MEMORY_GOAL:.2f} x", round(memory, 2) <= MEMORY_GOAL),
        Row(f"{name}: KL to {peer}, mean over {len(kl_N)} tokens", round(float(kl_N.mean()), 6), "nats"),
        Row(f"{name}: KL to {peer}, worst token", round(float(kl_N.max()), 5), "nats"),
        Row(f"{name}: log p of the written token apart, mean", round(float(apart_N.mean()), 6), "nats"),
        Row(f"{name}: log p of the written token apart, worst", round(float(apart_N.max()), 5), "nats"),
        Row(f"{name}: KL on the fixed tokens of a replica's start", round(fixed.kl, 6), "nats"),
    ]  # fmt: skip


@torch.no_grad()
def distances(
    full: FrozenModel, small: FrozenModel, tokens: list[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """KL(full ‖ small) and |Δ log p| of the written token, of every token but the first of a row."""
    kls, gaps = [], []
    for row in tokens:
        ids_1T = torch.from_numpy(row.astype(np.int64))[None].to(full.device)
        was, now = (
            one.model(input_ids=ids_1T, use_cache=False).logits[0, :-1].float().log_softmax(-1)
            for one in (full, small)
        )
        kls.append((was.exp() * (was - now)).sum(-1).cpu().numpy())
        gaps.append((was - now).gather(1, ids_1T[0, 1:, None]).abs()[:, 0].cpu().numpy())
    return np.concatenate(kls), np.concatenate(gaps)


def bytes_of(frozen: FrozenModel) -> int:
    """Of all weights and their scales, tied ones once."""
    tensors = [*frozen.model.parameters(), *frozen.model.buffers()]
    parts = {tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in tensors}
    return sum(parts.values())


if __name__ == "__main__":
    main()
