"""Differences between our results for a model and those of a plain transformers forward, one row at a time."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from understudy.engines.base import GenerateRequest, Generation, Sampling
from understudy.engines.local.engine import HFEngine
from understudy.policy.forward.head import logits_of
from understudy.policy.policy import Policy
from understudy.policy.step import PolicySettings
from understudy.teacher.protocol import request_of
from understudy.teacher.scoring.body import ScoringLayout
from understudy.teacher.scoring.model import FrozenModel
from understudy.teacher.scoring.scorer import Scorer, ScorerOptions
from understudy.teacher.scoring.warm_up import warm_up
from understudy.types.batch import Batch
from understudy.types.jagged import Jagged
from understudy.types.loss import LossInputs, LossOutput, StudentHead
from understudy.types.scores import ScoreItem, Signal


def rows_of(lengths: Sequence[int], vocab: int, *, shared: int = 0, seed: int = 0) -> list[np.ndarray]:
    """Random rows; the first `shared` tokens are the same in all."""
    rng = np.random.default_rng(seed)
    begin = rng.integers(3, vocab, shared)
    rows = [np.concatenate([begin, rng.integers(3, vocab, max(lengths))])[:length] for length in lengths]
    return [row.astype(np.int32) for row in rows]


@torch.no_grad()
def plain_logprobs(model: Any, row: np.ndarray) -> np.ndarray:
    """float32 [length − 1, V] of one row alone."""
    ids = torch.from_numpy(row.astype(np.int64))[None]
    return np.asarray(model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1))


def scored(
    model: Any, rows: Sequence[np.ndarray], layout: ScoringLayout = ScoringLayout.AUTO
) -> list[np.ndarray]:
    """Every row's log-probabilities from a teacher with this model, all rows in one request."""
    config = model.config.get_text_config()
    held = getattr(config, "max_position_embeddings", 1 << 20)
    frozen = FrozenModel(
        copy.deepcopy(model).requires_grad_(False), "here", "float32", torch.device("cpu"), held
    )
    scorer = Scorer("t", frozen, ScorerOptions(layout=layout))
    warm_up(scorer)
    items = [
        ScoreItem(f"row-{i}", row, np.arange(1, len(row), dtype=np.int32), Signal.SAMPLED)
        for i, row in enumerate(rows)
    ]
    return [scores.sampled_logprobs for scores in scorer.score(request_of(items)).split()]


def score_error(model: Any, rows: Sequence[np.ndarray], layout: ScoringLayout = ScoringLayout.AUTO) -> float:
    """The largest difference, in nats."""
    gaps = []
    for row, found in zip(rows, scored(model, rows, layout), strict=True):
        plain = plain_logprobs(model, row)[np.arange(len(row) - 1), row[1:]]
        gaps.append(np.abs(plain - found).max())
    return float(max(gaps))


def _cross_entropy(head: StudentHead, inputs: LossInputs) -> LossOutput:
    logprobs_N = logits_of(head).log_softmax(-1).gather(1, inputs.token_ids_N[:, None])[:, 0]
    loss = -(inputs.weights_N * logprobs_N).sum()
    return LossOutput(loss, -logprobs_N.detach(), logprobs_N.detach(), {})


def gradient_error(model: Any, rows: Sequence[np.ndarray], **settings: Any) -> float:
    """The largest difference of a weight's gradient, relative to that gradient's largest entry."""
    plain, trained = copy.deepcopy(model), copy.deepcopy(model)
    policy = Policy(trained, PolicySettings(**settings))
    tokens = [torch.from_numpy(row.astype(np.int64)) for row in rows]
    masks = [torch.arange(len(row)) > 0 for row in rows]
    batch = Batch(
        keys=tuple(f"row-{i}" for i in range(len(rows))),
        tokens=Jagged.from_rows(tokens),
        loss_mask=Jagged.from_rows(masks),
        behaviour_logprobs=Jagged.from_rows([torch.where(mask, -1.0, float("nan")) for mask in masks]),
    )
    for row in tokens:
        logprobs = plain(input_ids=row[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
        (-logprobs.gather(1, row[1:, None]).sum() / 100).backward()
    ours: dict[str, torch.Tensor | None] = {}

    def keep_instead_of_stepping(rate: float, norm: float) -> None:
        ours.update((name, weight.grad) for name, weight in trained.named_parameters())

    policy.optimizer.step = keep_instead_of_stepping  # type: ignore[method-assign]
    policy.update(batch, _cross_entropy, [torch.full((len(row) - 1,), 0.01) for row in rows])
    gaps = [0.0]
    for name, weight in plain.named_parameters():
        expected, found = (
            torch.zeros_like(weight) if one is None else one for one in (weight.grad, ours.get(name))
        )
        gaps.append(float((expected - found).abs().max()) / max(float(expected.abs().max()), 1e-3))
    return max(gaps)


def generated(
    model: Any, prompts: Sequence[np.ndarray], new: int, max_length: int, **sampling: Any
) -> list[Generation]:
    async def body() -> list[Generation]:
        engine = HFEngine(copy.deepcopy(model), max_batch=8, device="cpu", pad_id=0, max_length=max_length)
        try:
            asked = [
                GenerateRequest(f"row-{i}", prompt, Sampling(new, candidates=1, **sampling), seed=i)
                for i, prompt in enumerate(prompts)
            ]
            return await engine.generate(asked)
        finally:
            await engine.close()

    return asyncio.run(body())


def generation_error(model: Any, prompts: Sequence[np.ndarray], new: int, max_length: int) -> float:
    """The largest difference of a written token's log-probability, in nats; the best id at every place must be the same."""
    gaps = []
    for prompt, found in zip(prompts, generated(model, prompts, new, max_length), strict=True):
        plain = plain_logprobs(model, np.concatenate([prompt, found.tokens]))[len(prompt) - 1 :]
        gaps.append(np.abs(plain[np.arange(new), found.tokens] - found.logprobs).max())
        assert found.candidate_ids is not None
        assert found.candidate_ids[:, 0].tolist() == plain.argmax(-1).tolist()
    return float(max(gaps))
