"""A real engine that records its requests and generations, and a function that runs prompts through a loop on it."""

import asyncio
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from understudy.engines.base import GenerateRequest, Generation, Sampling
from understudy.engines.local.engine import HFEngine
from understudy.rollout.agents.agent import AgentLoop, LoopContext
from understudy.rollout.render import Renderer
from understudy.rollout.seeds import derive_seed
from understudy.types.prompt import Prompt
from understudy.types.trajectory import Trajectory

CONTEXT = 96


class RecordingEngine:
    def __init__(self, tokenizer: Any, context: int = CONTEXT) -> None:
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=context,
        )  # fmt: skip
        self._inner = HFEngine(
            Qwen3ForCausalLM(config), max_batch=64, device="cpu", pad_id=0, max_length=context, version=5
        )
        self.written: dict[str, list[tuple[GenerateRequest, Generation]]] = {}

    async def generate(self, request: GenerateRequest, prompt_key: str) -> Generation:
        (generation,) = await self._inner.generate([request])
        self.written.setdefault(prompt_key, []).append((request, generation))
        return generation

    async def close(self) -> None:
        await self._inner.close()


def attempt(
    tokenizer: Any,
    loop: AgentLoop,
    prompts: list[Prompt],
    *,
    sampling: Sampling | None = None,
    session: int = 0,
    context: int = CONTEXT,
) -> tuple[list[list[Trajectory]], RecordingEngine]:
    """Runs every prompt through the loop concurrently. Returns the trajectories per prompt, and the engine."""

    async def body() -> tuple[list[list[Trajectory]], RecordingEngine]:
        engine = RecordingEngine(tokenizer, context)
        renderer = Renderer(tokenizer, context=context)

        async def one(prompt: Prompt) -> list[Trajectory]:
            async def generate(tokens: np.ndarray, sampling: Sampling, turn: int) -> Generation:
                seed = derive_seed(11, prompt.epoch, prompt.key, session, turn)
                return await engine.generate(
                    GenerateRequest(f"{prompt.key}/{turn}", tokens, sampling, seed), prompt.key
                )

            settings = sampling or Sampling(8, (tokenizer.eos_token_id,))
            return await loop.run(
                prompt, LoopContext(generate, renderer, settings, prompt.key, session, context)
            )

        try:
            return [list(result) for result in await asyncio.gather(*map(one, prompts))], engine
        finally:
            await engine.close()

    return asyncio.run(asyncio.wait_for(body(), 60))
