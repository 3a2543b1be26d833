"""A compiled teacher compiles during its start and never again, whatever the lengths and the packing of requests."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from teacher_rig import VOCAB, write_model
from transformers import AttentionInterface

from understudy.nn import compiled_layers
from understudy.teacher.protocol import request_of
from understudy.teacher.scoring import body, varlen
from understudy.teacher.scoring.model import load_frozen
from understudy.teacher.scoring.probe import probe_item
from understudy.teacher.scoring.scorer import Scorer, ScorerOptions
from understudy.teacher.scoring.warm_up import rehearse


@torch.library.custom_op("understudy_test::in_groups", mutates_args=())
def in_groups(query: torch.Tensor, groups_G3: torch.Tensor) -> torch.Tensor:
    """Stands in for cuDNN's attention."""
    return query.clone()


@torch.library.custom_op("understudy_test::by_lengths", mutates_args=())
def by_lengths(query: torch.Tensor, ends: torch.Tensor, longest: int, longest_key: int) -> torch.Tensor:
    """Stands in for FlashAttention, which takes the longest lengths as Python numbers."""
    return query.clone()


in_groups.register_fake(lambda query, groups_G3: torch.empty_like(query))
by_lengths.register_fake(lambda query, ends, longest, longest_key: torch.empty_like(query))


def attend(
    module: Any,
    query_1HTD: torch.Tensor,
    key_1HTD: torch.Tensor,
    *others: Any,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    max_length_k: int,
    key_places: torch.Tensor | None = None,
    groups: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    query = query_1HTD[0].transpose(0, 1)
    if groups is not None:
        return in_groups(query, groups)[None], None
    if key_places is not None:
        query = query + key_1HTD[0, 0][key_places].sum()
    return by_lengths(query, cu_seq_lens_q, max_length_q, max_length_k)[None], None


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The graphs compiled so far. Rows are laid out as on a GPU."""
    made: list[Any] = []

    def count(graph: Any, inputs: Sequence[torch.Tensor]) -> Any:
        made.append(graph)
        return graph.forward

    monkeypatch.setattr(compiled_layers, "BACKEND", count)
    monkeypatch.setattr(body, "takes_groups", lambda *_, **__: True)
    monkeypatch.setattr(varlen, "varlen_attention", attend)  # `register` installs it instead of the real one
    torch._dynamo.reset()
    yield made
    monkeypatch.undo()
    AttentionInterface.register(varlen.NAME, varlen.varlen_attention)
    torch._dynamo.reset()


def test_requests_of_any_lengths_after_warm_up_compile_no_further_graphs(
    tmp_path: Path, graphs: list[Any]
) -> None:
    frozen = load_frozen(str(write_model(tmp_path / "model")))
    scorer = Scorer("t", frozen, ScorerOptions(max_batch_tokens=512, layout=body.ScoringLayout.PACKED))
    scorer.body.compile_layers()
    rehearse(scorer)
    first = len(graphs)
    assert first > 0
    rng = np.random.default_rng(1)
    shapes = ([64] * 4, [64], [128, 128, 64], [5], [200], [2, 2], [33, 7, 100], [61] * 9, [256], [63, 64, 65])
    for lengths in shapes:
        rows = [rng.integers(0, VOCAB, length).astype(np.int32) for length in lengths]
        scorer.score(request_of([probe_item(f"{i}", row) for i, row in enumerate(rows)]))
        for row in rows[1:]:
            shared = min(len(row), len(rows[0])) - 1
            row[:shared] = rows[0][:shared]
        scorer.score(request_of([probe_item(f"{i}", row) for i, row in enumerate(rows)]))
    assert len(graphs) == first
