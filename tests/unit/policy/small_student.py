"""Small models, batches and objectives for tests of the policy."""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from understudy.policy.forward.forward import Objective
from understudy.policy.forward.head import logits_of
from understudy.policy.load import switch_off_dropout
from understudy.policy.optim.adamw import AdamWSettings
from understudy.policy.optim.schedule import Schedule, ScheduleKind
from understudy.policy.step import PolicySettings
from understudy.types.batch import Batch
from understudy.types.jagged import Jagged
from understudy.types.loss import LossInputs, LossOutput, StudentHead
from understudy.types.loss_metrics import MetricSum

VOCAB = 23


def qwen3(seed: int = 0, tied: bool = True, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=0.3,
        attention_dropout=0.5,
    )
    return Qwen3ForCausalLM(config).to(dtype)


def windowed() -> PreTrainedModel:
    """A student whose first layer has a sliding window of four tokens."""
    model = qwen3()
    model.config.layer_types = ["sliding_attention", "full_attention"]
    model.config.sliding_window = 4
    rebuilt = type(model)(model.config)
    rebuilt.load_state_dict(model.state_dict())
    switch_off_dropout(rebuilt)
    return rebuilt.train()


def llama(seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config)


def gemma2(seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = Gemma2Config(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        sliding_window=6,
        final_logit_softcapping=5.0,
        attn_logit_softcapping=10.0,
        initializer_range=0.3,
        attn_implementation="eager",
    )
    return Gemma2ForCausalLM(config)


def settings(**changes: object) -> PolicySettings:
    defaults = {
        "schedule": Schedule(ScheduleKind.CONSTANT, peak=1e-2),
        "adamw": AdamWSettings(weight_decay=0.1),
    }
    return PolicySettings(**{**defaults, **changes})  # type: ignore[arg-type]


def batch_of(masks: list[list[int]], seed: int = 0, vocab: int = VOCAB) -> Batch:
    """One row per mask; tokens are random, behaviour logprobs are finite exactly where the mask is set."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(0, vocab, (len(mask),), generator=generator) for mask in masks]
    loss_masks = [torch.tensor(mask, dtype=torch.bool) for mask in masks]
    logprobs = [torch.where(mask, -1.0, float("nan")) for mask in loss_masks]
    return Batch(
        keys=tuple(f"row-{index:03d}" for index in range(len(masks))),
        tokens=Jagged.from_rows(tokens),
        loss_mask=Jagged.from_rows(loss_masks),
        behaviour_logprobs=Jagged.from_rows(logprobs),
    )


def varied_batch(rows: int = 13, seed: int = 0) -> Batch:
    """Different prompt lengths, several turns, different response lengths."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    masks = []
    for _ in range(rows):
        mask: list[int] = []
        for _ in range(draw(1, 4)):
            mask += [0] * draw(1, 6) + [1] * draw(1, 7)
        masks.append(mask)
    return batch_of(masks, seed)


def token_mean(batch: Batch) -> Jagged:
    counts = torch.tensor([int(mask.sum()) for mask in batch.loss_mask])
    total = int(counts.sum())
    return Jagged(
        torch.full((total,), 1.0 / max(total, 1)), torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    )


def cross_entropy(head: StudentHead, inputs: LossInputs) -> LossOutput:
    """The weighted sum of −log q(y). Its gradient reaches every weight."""
    logprobs_NV = logits_of(head).log_softmax(-1)
    sampled_N = logprobs_NV.gather(1, inputs.token_ids_N[:, None])[:, 0]
    loss = -(inputs.weights_N * sampled_N).sum()
    metrics = {"nll": MetricSum(-sampled_N.detach().sum(), float(len(sampled_N)))}
    return LossOutput(
        loss=loss, per_token_N=-sampled_N.detach(), logprobs_N=sampled_N.detach(), metrics=metrics
    )


def poisoned(where: str, token: int) -> Objective:
    """Cross-entropy that is not finite on one token id: in its value, or only in its gradient."""

    def objective(head: StudentHead, inputs: LossInputs) -> LossOutput:
        output = cross_entropy(head, inputs)
        hit_N = inputs.token_ids_N == token
        if where == "loss":
            return replace(output, loss=output.loss + torch.where(hit_N, float("nan"), 0.0).sum())
        # sqrt has an infinite slope at 0: the value stays finite, the gradient does not.
        zero_N = torch.where(hit_N, (head.hidden_NH[:, 0] * 0.0).abs(), 1.0)
        return replace(
            output,
            loss=output.loss + zero_N.sqrt().sum() * 0.0 + torch.where(hit_N, zero_N.sqrt(), 0.0).sum(),
        )

    return objective


def plain_loss(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """The same loss from transformers' own forward, one row at a time, in float64-summed plain code."""
    parts = []
    for ids, mask in zip(batch.tokens, batch.loss_mask, strict=True):
        logprobs_TV = model(input_ids=ids[None], use_cache=False).logits[0].float().log_softmax(-1)
        parts += [-logprobs_TV[t - 1, ids[t]] for t in range(1, len(ids)) if mask[t]]
    return torch.stack(parts).mean()
