"""Small real models and requests for the engine tests."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from understudy.engines.base import GenerateRequest, Generation, Sampling
from understudy.engines.local.engine import HFEngine

VOCAB, EOS = 42, 2
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}


def make_model(family: str, seed: int = 0) -> Any:
    """A random model whose logits are spread widely enough that its tokens depend on its input."""
    torch.manual_seed(seed)
    if family == "llama":
        model: Any = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True))
    elif family == "llama-16":
        model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, "head_dim": 16}))
    elif family == "gemma3":  # alternating sliding windows
        kinds = ["sliding_attention", "full_attention"]
        model = Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE, sliding_window=4, layer_types=kinds))
    elif family == "qwen3-16":  # a head size that the kernels support
        model = Qwen3ForCausalLM(Qwen3Config(**{**SHAPE, "head_dim": 16}, tie_word_embeddings=False))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=False))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8.0)
    return model.eval()


@asynccontextmanager
async def engine_over(model: Any, **settings: Any) -> AsyncIterator[HFEngine]:
    engine = HFEngine(model, **{"max_batch": 64, "device": "cpu", "pad_id": 0, "max_length": 128, **settings})
    try:
        yield engine
    finally:
        await engine.close()


def make_requests(
    count: int, sampling: Sampling, *, seed: int = 0, shortest: int = 1, longest: int = 11
) -> list[GenerateRequest]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(shortest, longest + 1, count)
    return [
        GenerateRequest(f"row-{i}", rng.integers(3, VOCAB, length).astype(np.int32), sampling, seed=1000 + i)
        for i, length in enumerate(lengths)
    ]


async def tokens_drawn(engine: HFEngine, count: int) -> None:
    """Returns once the running batch has drawn `count` tokens a row."""
    while (batch := engine._scheduler._batch) is None or batch.decoding._step < count:
        await asyncio.sleep(0.001)


def logprobs_over_kept_cache(
    old: Any, new: Any, request: GenerateRequest, generation: Generation, switch: int
) -> np.ndarray:
    """By plain transformers, the log-probabilities of a generation whose first `switch` tokens `old` drew, if `new`
    continued over the keys and values of `old`. The newest token was drawn before the publish and read after it, so
    `new` computes its keys."""
    ids = torch.tensor([[*request.tokens.tolist(), *generation.tokens.tolist()]])
    border = len(request.tokens) + switch - 1
    with torch.no_grad():
        before = old(input_ids=ids[:, :border], use_cache=True)
        after = new(input_ids=ids[:, border:], past_key_values=before.past_key_values, use_cache=True)
    logprobs = torch.cat([before.logits[0], after.logits[0]]).log_softmax(-1)
    written = len(request.tokens)
    return logprobs[written - 1 : -1].gather(1, ids[0, written:, None])[:, 0].numpy()
