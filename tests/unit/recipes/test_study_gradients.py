"""What the study's students are trained with: the gradient of a whole step against plain transformers in float32.

On a GPU in SmolLM2-135M's own widths (9 query heads over 3, 576 wide, 49,152 ids), where the packed layout, the variable-length
attention and the Triton loss are at work; everywhere in small.
"""

from dataclasses import dataclass

import pytest
import torch
from torch.nn.functional import cosine_similarity
from transformers import LlamaConfig, LlamaForCausalLM

from understudy.losses.objective import Backend, Objective
from understudy.losses.reduce import token_weights
from understudy.policy.microbatch import Layout
from understudy.policy.policy import Policy, PolicySettings
from understudy.types.batch import Batch
from understudy.types.jagged import Jagged

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
    return LlamaForCausalLM(config).to(dtype).to(device)


def jagged(rows: list[torch.Tensor]) -> Jagged:
    return Jagged(torch.cat(rows), torch.tensor([0, *map(len, rows)]).cumsum(0))


@torch.no_grad()
def judged(teacher: LlamaForCausalLM, tokens: torch.Tensor, start: int) -> tuple[torch.Tensor, ...]:
    """Ids and logprobs of the teacher's K best, and its logprob of what was written, from `start` on."""
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
def test_a_steps_gradient_is_that_of_plain_transformers(
    device: str, layout: Layout, backend: Backend
) -> None:
    widths, dtype = (SMALL, torch.float32) if device == "cpu" else (SMOLLM2, torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(30, 200, (widths.rows,), generator=generator).tolist()
    rows = [torch.randint(3, widths.vocab, (length,), generator=generator) for length in lengths]
    starts = [length // 3 for length in lengths]
    teacher = build(widths, 3, seed=1, device=device, dtype=dtype).eval()
    ids, best, written = zip(
        *(judged(teacher, row, start) for row, start in zip(rows, starts, strict=True)), strict=True
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
    taken: dict[str, torch.Tensor] = {}
    optimizer_step = policy.optimizer.step

    def step(learning_rate: float, grad_norm: float) -> None:
        taken.update({name: master.grad.clone() for name, master in policy.optimizer.masters.items()})
        optimizer_step(learning_rate, grad_norm)

    policy.optimizer.step = step
    weights = Jagged(token_weights(counts, "token-mean"), torch.tensor([0, *counts]).cumsum(0))
    result = policy.update(batch, Objective("forward_kl", "topk", backend=backend), weights, 4096)

    exact = dtype == torch.float32
    assert result.loss == pytest.approx(loss, rel=1e-4 if exact else 2e-2)
    for name, parameter in plain.named_parameters():
        expected, found = parameter.grad.flatten().double(), taken[name].flatten().double()
        assert cosine_similarity(found, expected, 0) > (1 - 1e-5 if exact else 0.98), name
        assert float(found.norm() / expected.norm()) == pytest.approx(1.0, abs=1e-3 if exact else 0.05), name
