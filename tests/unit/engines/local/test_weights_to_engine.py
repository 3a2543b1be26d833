"""The real engine under both ways of publishing samples from the policy as last published."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from understudy.engines.base import GenerateRequest, Generation, Sampling
from understudy.engines.local.engine import HFEngine
from understudy.policy.forward.forward import sampled_logprobs
from understudy.policy.optim.adamw import AdamWSettings
from understudy.policy.optim.schedule import Schedule
from understudy.policy.policy import Policy
from understudy.policy.step import PolicySettings
from understudy.types.batch import Batch
from understudy.types.jagged import Jagged
from understudy.types.loss import LossInputs, LossOutput, StudentHead
from understudy.weights.publish import CopiedWeights, SharedWeights, WeightPublisher

PROMPT = [3, 7, 1]


def student() -> nn.Module:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=19,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
    )
    return Qwen3ForCausalLM(config)


def likelihood(head: StudentHead, inputs: LossInputs) -> LossOutput:
    logprobs_N = sampled_logprobs(head, inputs)
    return LossOutput(-(inputs.weights_N * logprobs_N).sum(), -logprobs_N.detach(), logprobs_N.detach(), {})


def as_batch(generations: list[Generation]) -> Batch:
    rows = [torch.tensor([*PROMPT, *generation.tokens.tolist()]) for generation in generations]
    masks = [torch.arange(len(row)) >= len(PROMPT) for row in rows]
    logprobs = [
        torch.cat([torch.full((len(PROMPT),), torch.nan), torch.tensor(g.logprobs)]) for g in generations
    ]
    keys = tuple(f"row-{index}" for index in range(len(rows)))
    return Batch(keys, Jagged.from_rows(rows), Jagged.from_rows(masks), Jagged.from_rows(logprobs))


@pytest.mark.parametrize("way", ["shared", "copied"])
def test_the_engine_samples_from_the_published_policy(way: str) -> None:
    async def run() -> None:
        settings = PolicySettings(schedule=Schedule(peak=3e-2), adamw=AdamWSettings(grad_clip=None))
        policy = Policy(student(), settings)
        engine = HFEngine(student(), max_batch=8, device="cpu", pad_id=0, max_length=32)
        publisher: WeightPublisher = (
            SharedWeights(policy.model, engine)
            if way == "shared"
            else CopiedWeights(policy.named_weights, engine)
        )
        sampling = Sampling(max_new_tokens=6, stop_ids=(2,))
        try:
            for version in range(3):
                await publisher.publish(version)
                requests = [
                    GenerateRequest(f"r{i}", np.array(PROMPT, np.int32), sampling, seed=i) for i in range(4)
                ]
                generations = await engine.generate(requests)
                assert all((generation.weight_versions == version).all() for generation in generations)
                batch = as_batch(generations)
                policy_logprobs = policy.logprobs(batch).values
                engine_logprobs = torch.cat([torch.tensor(generation.logprobs) for generation in generations])
                assert torch.allclose(policy_logprobs, engine_logprobs, atol=1e-4)
                counts = batch.loss_mask.values.sum()
                weights = [torch.full((int(mask.sum()),), 1.0 / int(counts)) for mask in batch.loss_mask]
                policy.update(batch, likelihood, weights)
                assert not torch.allclose(policy.logprobs(batch).values, policy_logprobs, atol=1e-3)
        finally:
            await engine.close()

    asyncio.run(run())
