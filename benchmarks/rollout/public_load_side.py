"""One system of public_load.py, in a process of its own: `public_load_side.py vllm|ours SHAPE MODEL_FOLDER`.

Says {"seconds": …} when it is ready; then, for each line with a load's name on standard input, generates the load and says
how many tokens it wrote in how many seconds. Everything else that it and its libraries print goes to standard error.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

PLACES = 256
CONTEXT = 2048
KEYS_AND_VALUES = 40 * 2**30
"""vLLM's memory for keys and values: all 256 sequences of the public load at their full length need 32 GB with 28 layers
and 41 GB with 36."""
_TAIL = 1.2


@dataclass(frozen=True, slots=True)
class Request:
    tokens: list[int]
    new: int
    stops: tuple[int, ...] = ()


def public(vocabulary: int) -> list[Request]:
    """The draws of nano-vllm's bench.py, in its order."""
    draw = random.Random(0)
    prompts = [
        [draw.randint(0, 10_000) % vocabulary for _ in range(draw.randint(100, 1024))] for _ in range(256)
    ]
    return [Request(tokens, draw.randint(100, 1024)) for tokens in prompts]


def long_tail(vocabulary: int) -> list[Request]:
    draw = random.Random(1)
    return [
        Request(_tokens(draw, 128, vocabulary), min(1900, int(64 * (1 - draw.random()) ** (-1 / _TAIL))))
        for _ in range(1024)
    ]


def early_end(vocabulary: int) -> list[Request]:
    draw = random.Random(2)
    stops = tuple(range(40, vocabulary, 500))
    return [Request(_tokens(draw, 128, vocabulary), 1024, stops) for _ in range(512)]


def _tokens(draw: random.Random, count: int, vocabulary: int) -> list[int]:
    return [draw.randrange(vocabulary) for _ in range(count)]


LOADS: dict[str, Callable[[int], list[Request]]] = {
    "public": public,
    "long-tail": long_tail,
    "early-end": early_end,
}
Generate = Callable[[Sequence[Request]], list[tuple[int, float]]]
"""Number of tokens and mean log-probability of each answer."""


def open_vllm(folder: str, shape: str) -> tuple[Generate, int]:
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    from vllm import LLM, SamplingParams  # noqa: PLC0415  a peer: imported only in a process of its own

    engine = LLM(
        folder, dtype="bfloat16", load_format="dummy", skip_tokenizer_init=True, max_model_len=CONTEXT,
        max_num_seqs=PLACES, enable_prefix_caching=False, kv_cache_memory_bytes=KEYS_AND_VALUES,
        gpu_memory_utilization=0.1,  # only checked against what is free: the line above replaces it
    )  # fmt: skip

    def generate(requests: Sequence[Request]) -> list[tuple[int, float]]:
        sampling = [
            SamplingParams(
                max_tokens=one.new, temperature=1.0, ignore_eos=True, stop_token_ids=list(one.stops), logprobs=0,
                flat_logprobs=True, detokenize=False,
            )
            for one in requests
        ]  # fmt: skip
        prompts = [{"prompt_token_ids": one.tokens} for one in requests]
        answers = [answer.outputs[0] for answer in engine.generate(prompts, sampling, use_tqdm=False)]
        return [(len(one.token_ids), one.cumulative_logprob / len(one.token_ids)) for one in answers]

    return generate, engine.llm_engine.model_config.get_vocab_size()


def open_ours(folder: str, shape: str) -> tuple[Generate, int]:
    import numpy as np  # noqa: PLC0415
    import torch  # noqa: PLC0415

    from rollout_models import SHAPES, TINY, build_model  # noqa: PLC0415
    from understudy.engines.base import GenerateRequest, Sampling  # noqa: PLC0415
    from understudy.engines.local.engine import HFEngine  # noqa: PLC0415
    from understudy.engines.local.scheduler import Batching  # noqa: PLC0415

    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    sizes = TINY if shape == "tiny" else SHAPES[shape]
    engine = HFEngine(
        build_model(sizes, device, dtype).eval(), max_batch=PLACES, device=device, pad_id=0, max_length=CONTEXT,
        batching=Batching.CONTINUOUS, version=0,
    )  # fmt: skip

    async def all_of(requests: Sequence[Request]) -> list[tuple[int, float]]:
        calls = [
            engine.generate(
                [
                    GenerateRequest(
                        str(index),
                        np.array(one.tokens, dtype=np.int32),
                        Sampling(one.new, one.stops),
                        seed=index,
                    )
                ]
            )
            for index, one in enumerate(requests)
        ]
        answers = [answer for (answer,) in await asyncio.gather(*calls)]
        return [(len(one.tokens), float(one.logprobs.mean())) for one in answers]

    loop = asyncio.new_event_loop()
    return lambda requests: loop.run_until_complete(all_of(requests)), sizes["vocab_size"]


def main(system: str, shape: str, folder: str) -> None:
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print to standard output
    begun = time.perf_counter()
    generate, vocabulary = {"vllm": open_vllm, "ours": open_ours}[system](folder, shape)
    # The public load's batch with few tokens: compiles kernels and records graphs for every size on the way down.
    generate([Request(one.tokens, 2 + one.new // 64) for one in public(vocabulary)])
    print(json.dumps({"seconds": time.perf_counter() - begun}), file=replies)
    for line in sys.stdin:
        requests = LOADS[line.strip()](vocabulary)
        begun = time.perf_counter()
        answers = generate(requests)
        seconds = time.perf_counter() - begun
        for request, (count, logprob) in zip(requests, answers, strict=True):
            if not math.isfinite(logprob) or not (count == request.new or (request.stops and count > 0)):
                raise SystemExit(f"an answer has {count} of {request.new} tokens, mean logprob {logprob}")
        print(json.dumps({"tokens": sum(count for count, _ in answers), "seconds": seconds}), file=replies)


if __name__ == "__main__":
    main(*sys.argv[1:])
