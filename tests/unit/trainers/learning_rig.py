"""A tiny student whose steps can be computed by hand, and the part of a run that `learn` reads."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from understudy.assembly.learner import objective_of, policy_settings
from understudy.config import Recipe, parse_recipe
from understudy.observability.live import LiveView
from understudy.planning.resolved import resolve
from understudy.policy.critic import give_value_head
from understudy.policy.policy import Policy
from understudy.policy.reference import ReferenceModel
from understudy.trainers.critic.local import Critic
from understudy.trainers.system import MicroBatches, Tally
from understudy.types.batch import Batch
from understudy.types.jagged import Jagged

VOCAB = 19


def model(seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config)


def recipe_of(**sections: dict[str, Any]) -> Recipe:
    table: dict[str, Any] = {
        "student": {"model": "student"},
        "data": {"train": "train.jsonl", "reward": "module:function"},
        "rollout": {"n": 2, "max_new_tokens": 6},
        "trainer": {"learning_rate": 1e-2, "batch_size": 7},
        "loss": {"distill_coef": 0.0, "task_coef": 1.0},
    }
    for name, section in sections.items():
        table[name] = {**table.get(name, {}), **section}
    return parse_recipe(table)


def batch_of(prompts: int = 7, sessions: int = 2, seed: int = 0) -> Batch:
    """Prompts of different lengths with answers of different lengths; some answers use up their six tokens."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    keys, tokens, masks, logprobs, rewards, stops = [], [], [], [], [], []
    for prompt in range(prompts):
        before = draw(1, 5)
        for session in range(sessions):
            after = draw(2, 7)
            keys.append(f"00000-{prompt:07d}_{session}_0")
            tokens.append(torch.randint(0, VOCAB, (before + after,), generator=generator))
            masks.append(torch.arange(before + after) >= before)
            logprobs.append(
                torch.where(masks[-1], -2.5 - torch.rand(before + after, generator=generator), float("nan"))
            )
            rewards.append(float(draw(0, 3)))
            stops.append("length" if after == 6 else "eos")
    return Batch(
        keys=tuple(keys),
        tokens=Jagged.from_rows(tokens),
        loss_mask=Jagged.from_rows(masks),
        behaviour_logprobs=Jagged.from_rows(logprobs),
        rewards=tuple(rewards),
        stop_reasons=tuple(stops),
    )


def learner_of(recipe: Recipe, seed: int = 0) -> Any:
    """The learner that `learn` takes, made of real parts, as a namespace in which a test may replace some."""
    resolved = resolve(recipe, gpus=0)
    settings = policy_settings(resolved.learn)
    critic = None
    if recipe.loss.advantage == "gae":
        assert recipe.critic is not None
        critic = Critic(Policy(give_value_head(model(seed + 1)), settings), recipe.critic)
    return SimpleNamespace(
        settings=replace(resolved.learn, deterministic=False),
        policy=Policy(model(seed), settings),
        objective=objective_of(recipe.loss),
        teacher_heads={},
        critic=critic,
        reference=ReferenceModel(model(seed + 2)) if recipe.loss.kl_coef else None,
        micro_batches=MicroBatches(recipe.trainer.micro_batch_tokens),
        state=SimpleNamespace(tally=Tally(), view=LiveView(0, enabled=False)),
    )


def plain_logprobs(student: PreTrainedModel, batch: Batch, row: int) -> torch.Tensor:
    """[P]: transformers' own forward of one row, read at t − 1."""
    ids, mask = batch.tokens[row], batch.loss_mask[row]
    logq = student(input_ids=ids[None], use_cache=False).logits[0].float().log_softmax(-1)
    return torch.stack([logq[t - 1, ids[t]] for t in range(1, len(ids)) if mask[t]])


def adamw(student: PreTrainedModel, rate: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.AdamW(student.parameters(), lr=rate, weight_decay=0.0)


def assert_same_weights(found: PreTrainedModel, expected: PreTrainedModel, atol: float = 5e-5) -> None:
    for (name, mine), theirs in zip(found.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(
            mine, theirs, atol=atol, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}"
        )
