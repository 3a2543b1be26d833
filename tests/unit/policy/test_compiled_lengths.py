"""Compiled layers serve micro-batches of any lengths without another compilation in the middle of a run."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from small_student import VOCAB, qwen3
from transformers import AttentionInterface

from understudy.nn import compiled_layers, grouped_attention
from understudy.policy.forward.attention import VARLEN, varlen_attention
from understudy.policy.forward.packed import lay_out
from understudy.policy.load import switch_off_dropout


@torch.library.custom_op("understudy_test::attention", mutates_args=())
def opaque(query_TQD: torch.Tensor, bounds: torch.Tensor, longest: int) -> torch.Tensor:
    """Stands in for the GPU's kernel, which takes the length of the longest row as a number."""
    return query_TQD.clone()


@opaque.register_fake
def _(query_TQD: torch.Tensor, bounds: torch.Tensor, longest: int) -> torch.Tensor:
    return torch.empty_like(query_TQD)


def attend(module: Any, query: torch.Tensor, *others: Any, **options: Any) -> tuple[torch.Tensor, None]:
    mixed = opaque(query[0].transpose(0, 1), options["cu_seq_lens_q"], options["max_length_q"])
    return mixed[None], None


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The graphs that have been compiled so far."""
    compiled: list[Any] = []

    def count(graph: Any, inputs: Sequence[torch.Tensor]) -> Any:
        compiled.append(graph)
        return graph.forward

    monkeypatch.setattr(compiled_layers, "BACKEND", count)
    AttentionInterface.register(VARLEN, attend)
    torch._dynamo.reset()
    yield compiled
    AttentionInterface.register(VARLEN, varlen_attention)
    torch._dynamo.reset()


@pytest.mark.parametrize("group", [False, True])
def test_later_micro_batches_of_other_lengths_cause_no_compilation(
    graphs: list[Any], group: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`group`: rows are padded to a few common lengths where that is faster."""
    monkeypatch.setattr(grouped_attention, "ROUND", 8)
    if group:
        AttentionInterface.register(VARLEN, varlen_attention)
    model = qwen3()
    model.set_attn_implementation(VARLEN)
    compiled_layers.compile_layers(model.model)

    def forward(lengths: Sequence[int]) -> None:
        line = lay_out(torch.zeros(1, sum(lengths), dtype=torch.long), lengths, group=group)
        # On a GPU the longest row is an upper bound, rounded up.
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


def test_compiled_layers_give_the_gradients_of_plain_layers_on_rows_padded_to_equal_lengths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gradients come from the compiler's own backward pass, to which attention and its gradient are two operators."""
    monkeypatch.setattr(grouped_attention, "ROUND", 8)
    monkeypatch.setattr(compiled_layers, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    found = []
    for compile_it in (True, False):
        model = qwen3()
        switch_off_dropout(model)
        model.set_attn_implementation(VARLEN)
        if compile_it:
            compiled_layers.compile_layers(model.model)
        for lengths in ([16] * 5 + [8], [24, 24]):
            ids = torch.arange(sum(lengths))[None] % VOCAB
            line = lay_out(ids, lengths, group=compile_it)
            assert ("groups" in line.options) == compile_it
            states = model.model(
                input_ids=line.ids_1U, position_ids=line.position_ids_1U, use_cache=False, **line.options
            ).last_hidden_state
            states.square().mean().backward()
        found.append([parameter.grad for parameter in model.model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    torch._dynamo.reset()
