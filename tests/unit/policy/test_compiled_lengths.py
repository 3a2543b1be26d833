"""A compiled layer serves micro-batches of any lengths: compiling again in the middle of a run holds everybody up."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from small_student import qwen3
from transformers import AttentionInterface

from understudy.policy import compiled
from understudy.policy.attention import VARLEN, varlen_attention
from understudy.policy.packed import lay_out


@torch.library.custom_op("understudy_test::attention", mutates_args=())
def opaque(query_TQD: torch.Tensor, bounds: torch.Tensor, longest: int) -> torch.Tensor:
    """Stands for the GPU's kernel, which takes the longest row as a number."""
    return query_TQD.clone()


@opaque.register_fake
def _(query_TQD: torch.Tensor, bounds: torch.Tensor, longest: int) -> torch.Tensor:
    return torch.empty_like(query_TQD)


def attend(module: Any, query: torch.Tensor, *others: Any, **options: Any) -> tuple[torch.Tensor, None]:
    mixed = opaque(query[0].transpose(0, 1), options["cu_seq_lens_q"], options["max_length_q"])
    return mixed[None], None


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """How many graphs have been compiled."""
    made: list[Any] = []

    def count(graph: Any, inputs: Sequence[torch.Tensor]) -> Any:
        made.append(graph)
        return graph.forward

    monkeypatch.setattr(compiled, "BACKEND", count)
    AttentionInterface.register(VARLEN, attend)
    torch._dynamo.reset()
    yield made
    AttentionInterface.register(VARLEN, varlen_attention)
    torch._dynamo.reset()


def test_no_lengths_of_later_micro_batches_make_it_compile_again(graphs: list[Any]) -> None:
    model = qwen3()
    model.set_attn_implementation(VARLEN)
    compiled.compile_layers(model)

    def forward(lengths: Sequence[int]) -> None:
        line = lay_out(torch.zeros(1, sum(lengths), dtype=torch.long), lengths, share=False)
        # As on a GPU: a bound, rounded up.
        longest = 1 << (max(lengths) - 1).bit_length()
        options = line.options | {"max_length_q": longest, "max_length_k": longest}
        with torch.no_grad():
            model.model(input_ids=line.ids_1U, position_ids=line.position_ids_1U, use_cache=False, **options)

    forward([16] * 5)
    first = len(graphs)
    assert first > 0
    for lengths in ([16] * 5, [16], [16] * 4 + [15], [7], [3, 3], [30, 9, 2]):
        forward(lengths)
    assert len(graphs) == first
