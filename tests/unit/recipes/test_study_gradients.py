"""Rollouts, teacher scores and the gradient of a whole step of the study, compared with plain transformers in float32.

On a GPU the models have the widths of SmolLM2-135M (9 query heads, 3 key heads, hidden size 576, 49,152 ids) and use the
packed layout, variable-length attention and the Triton loss. On a CPU they are small.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cosine_similarity
from transformers import LlamaConfig, LlamaForCausalLM

from understudy.engines.base import GenerateRequest, Generation, Sampling
from understudy.engines.local.engine import HFEngine
from understudy.losses.objective import Objective
from understudy.losses.reduce import token_weights
from understudy.losses.settings import Backend
from understudy.policy.microbatch import Layout
from understudy.policy.policy import Policy
from understudy.policy.step import PolicySettings
from understudy.teacher.protocol import request_of
from understudy.teacher.scoring.model import load_frozen
from understudy.teacher.scoring.scorer import Scorer
from understudy.teacher.scoring.warm_up import warm_up
from understudy.types.batch import Batch
from understudy.types.jagged import Jagged
from understudy.types.scores import ScoreItem, Signal

K = 16


@dataclass(frozen=True)
class Widths:
    vocab: int
    hidden: int
    inner: int
    heads: int
    key_heads: int
    size: int
    rows: int


SMALL = Widths(vocab=199, hidden=48, inner=96, heads=3, key_heads=1, size=16, rows=6)
SMOLLM2 = Widths(vocab=49_152, hidden=576, inner=1536, heads=9, key_heads=3, size=64, rows=24)
needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def build(widths: Widths, layers: int, seed: int, device: str, dtype: torch.dtype) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=widths.vocab,
        hidden_size=widths.hidden,
        intermediate_size=widths.inner,
        num_hidden_layers=layers,
        num_attention_heads=widths.heads,
        num_key_value_heads=widths.key_heads,
        head_dim=widths.size,
        tie_word_embeddings=True,
        initializer_range=0.04,
    )
    # Not `.to(dtype)`: that would round the rotary frequencies too, which loading a checkpoint does not do.
    model = LlamaForCausalLM._from_config(config, dtype=dtype).to(device)
    assert all(buffer.dtype == torch.float32 for buffer in model.buffers())
    return model


def jagged(rows: list[torch.Tensor]) -> Jagged:
    return Jagged(torch.cat(rows), torch.tensor([0, *map(len, rows)]).cumsum(0))


@torch.no_grad()
def scored(teacher: LlamaForCausalLM, tokens: torch.Tensor, start: int) -> tuple[torch.Tensor, ...]:
    """Ids and logprobs of the teacher's K best tokens, and its logprobs of the row's tokens, from `start` on."""
    logprobs = (
        teacher(input_ids=tokens[None].to(teacher.device)).logits[0].float().log_softmax(-1)[start - 1 : -1]
    )
    best, ids = logprobs.topk(K)
    written = logprobs.gather(1, tokens[start:, None].to(teacher.device))[:, 0]
    return ids.cpu(), best.cpu(), written.cpu()


@pytest.mark.parametrize(
    ("device", "layout", "backend"),
    [
        ("cpu", Layout.PADDED, "torch"),
        pytest.param("cuda", Layout.PADDED, "torch", marks=needs_gpu),
        pytest.param("cuda", Layout.PADDED, "triton", marks=needs_gpu),
        pytest.param("cuda", Layout.PACKED, "torch", marks=needs_gpu),
        pytest.param("cuda", Layout.PACKED, "triton", marks=needs_gpu),
    ],
)
def test_the_gradient_of_a_step_equals_that_of_plain_transformers(
    device: str, layout: Layout, backend: Backend
) -> None:
    widths, dtype = (SMALL, torch.float32) if device == "cpu" else (SMOLLM2, torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(30, 200, (widths.rows,), generator=generator).tolist()
    rows = [torch.randint(3, widths.vocab, (length,), generator=generator) for length in lengths]
    starts = [length // 3 for length in lengths]
    teacher = build(widths, 3, seed=1, device=device, dtype=dtype).eval()
    ids, best, written = zip(
        *(scored(teacher, row, start) for row, start in zip(rows, starts, strict=True)), strict=True
    )
    counts = [len(one) for one in written]

    plain, loss = build(widths, 4, seed=2, device=device, dtype=dtype).float(), 0.0
    for row, start, candidates, theirs in zip(rows, starts, ids, best, strict=True):
        ours = plain(input_ids=row[None].to(device)).logits[0].log_softmax(-1)[start - 1 : -1]
        at, p = ours.gather(1, candidates.to(device)), theirs.to(device).exp()
        rest_p, rest_q = 1 - p.sum(1), 1 - at.exp().sum(1)
        divergence = (p * (theirs.to(device) - at)).sum(1) + rest_p * (rest_p.log() - rest_q.log())
        share = divergence.sum() / sum(counts)
        share.backward()
        loss += share.item()

    batch = Batch(
        keys=tuple(f"{index:03d}" for index in range(len(rows))),
        tokens=jagged(rows),
        loss_mask=jagged(
            [torch.arange(length) >= start for length, start in zip(lengths, starts, strict=True)]
        ),
        behaviour_logprobs=jagged([torch.full((length,), -1.0) for length in lengths]),
        teachers=("teacher",) * len(rows),
        teacher_logprobs=jagged(list(written)),
        teacher_ids=jagged(list(ids)),
        teacher_topk_logprobs=jagged(list(best)),
    )
    policy = Policy(build(widths, 4, seed=2, device=device, dtype=dtype), PolicySettings(layout=layout))
    gradients: dict[str, torch.Tensor] = {}
    optimizer_step = policy.optimizer.step

    def step(learning_rate: float, grad_norm: float) -> None:
        gradients.update({name: master.grad.clone() for name, master in policy.optimizer.masters.items()})
        optimizer_step(learning_rate, grad_norm)

    policy.optimizer.step = step
    weights = Jagged(token_weights(counts, "token-mean"), torch.tensor([0, *counts]).cumsum(0))
    result = policy.update(batch, Objective("forward_kl", "topk", backend=backend), weights, 4096)

    exact = dtype == torch.float32
    assert result.loss == pytest.approx(loss, rel=1e-4 if exact else 2e-2)
    for name, parameter in plain.named_parameters():
        expected, found = parameter.grad.flatten().double(), gradients[name].flatten().double()
        assert cosine_similarity(found, expected, 0) > (1 - 1e-5 if exact else 0.98), name
        assert float(found.norm() / expected.norm()) == pytest.approx(1.0, abs=1e-3 if exact else 0.05), name


@torch.no_grad()
def plain_logprobs(model: LlamaForCausalLM, tokens: np.ndarray) -> torch.Tensor:
    """float32 [T − 1, V] on the host."""
    ids = torch.from_numpy(tokens).long()[None].to(model.device)
    return model(input_ids=ids).logits[0, :-1].float().log_softmax(-1).cpu()


DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_the_scores_of_a_teacher_equal_those_of_plain_transformers(device: str, tmp_path: Path) -> None:
    widths, dtype = (SMALL, torch.float32) if device == "cpu" else (SMOLLM2, torch.bfloat16)
    teacher = build(widths, 4, seed=1, device=device, dtype=dtype).eval()
    teacher.save_pretrained(tmp_path)
    rng = np.random.default_rng(0)
    items = []
    for index in range(2 * widths.rows):
        tokens = rng.integers(3, widths.vocab, int(rng.integers(30, 300))).astype(np.int32)
        scored_from = np.arange(len(tokens) // 2, len(tokens), dtype=np.int32)
        items.append(ScoreItem(f"{index}", tokens, scored_from, Signal.TOPK, K))
    scorer = Scorer("t", load_frozen(str(tmp_path), dtype=str(dtype).removeprefix("torch."), device=device))
    warm_up(scorer)
    scores = scorer.score(request_of(items)).split()
    rounded = [plain_logprobs(teacher, item.tokens)[item.positions - 1] for item in items]
    exact, errors, rounding = teacher.float(), [], []
    for item, score, rounded_PV in zip(items, scores, rounded, strict=True):
        plain_PV = plain_logprobs(exact, item.tokens)[item.positions - 1]
        assert score.ids is not None and score.logprobs is not None
        ids_PK, found_PK = torch.from_numpy(score.ids).long(), torch.from_numpy(score.logprobs)
        errors += [plain_PV.gather(1, ids_PK) - found_PK, plain_PV.topk(K).values - found_PK]
        rounding.append((plain_PV - rounded_PV).gather(1, ids_PK))
    error, own = torch.cat(errors).abs(), torch.cat(rounding).abs()
    if device == "cpu":
        assert error.mean() < 1e-5 and error.max() < 1e-4
    else:  # no further from float32 than transformers' own bfloat16 pass over one sequence at a time
        assert error.mean() < 1.1 * own.mean() and error.max() < 1.5 * own.max()


@pytest.mark.parametrize("device", DEVICES)
def test_the_logprobs_of_a_rollout_equal_those_of_plain_transformers(device: str) -> None:
    widths, dtype = (SMALL, torch.float32) if device == "cpu" else (SMOLLM2, torch.bfloat16)
    student = build(widths, 4, seed=1, device=device, dtype=dtype).eval()
    rng = np.random.default_rng(0)
    requests = [
        GenerateRequest(
            key=f"{index}",
            tokens=rng.integers(3, widths.vocab, int(rng.integers(5, 60))).astype(np.int32),
            sampling=Sampling(max_new_tokens=40),
            seed=index,
        )
        for index in range(2 * widths.rows)
    ]

    async def write() -> list[Generation]:
        engine = HFEngine(student, max_batch=widths.rows, device=device, pad_id=0, max_length=128)
        try:
            return await engine.generate(requests)
        finally:
            await engine.close()

    written = asyncio.run(write())
    exact = build(widths, 4, seed=1, device=device, dtype=dtype).eval().float()
    errors = []
    for request, generation in zip(requests, written, strict=True):
        tokens = np.concatenate([request.tokens, generation.tokens]).astype(np.int32)
        plain = plain_logprobs(exact, tokens)[len(request.tokens) - 1 :]
        theirs = plain.gather(1, torch.from_numpy(generation.tokens).long()[:, None])[:, 0]
        errors.append(theirs - torch.from_numpy(generation.logprobs))
    error = torch.cat(errors).abs()
    assert len(error) > 20 * widths.rows
    assert error.mean() < (1e-5 if device == "cpu" else 0.02) and error.max() < (
        1e-4 if device == "cpu" else 0.2
    )
