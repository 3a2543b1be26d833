"""Ids without a token are never drawn nor reported: the engine equals one over a model that does not have their rows."""

import asyncio
import copy
from typing import Any

import numpy as np
import pytest
import torch
from engine_models import EOS, VOCAB, engine_over, make_model, make_requests

from understudy.engines.base import GenerateRequest, Generation, Sampling
from understudy.engines.local.engine import CacheLayout
from understudy.engines.servers.dialects import DIALECTS, PieceRequest
from understudy.serving.frames import Decoder, encode
from understudy.types.usable_ids import UsableIds

LIMIT = 30
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "filters": {"top_k": 35, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2, "temperature": 0.9},
}


def written(model: Any, requests: list[GenerateRequest], layout: CacheLayout) -> list[Generation]:
    async def run() -> list[Generation]:
        async with engine_over(model, layout=layout) as engine:
            return await engine.generate(requests)

    return asyncio.run(run())


@pytest.mark.parametrize("layout", [CacheLayout.PADDED, CacheLayout.SLOTS])
@pytest.mark.parametrize("kind", list(SETTINGS))
def test_it_writes_as_a_model_without_those_rows(kind: str, layout: CacheLayout) -> None:
    whole = make_model("qwen3-16")
    cut = copy.deepcopy(whole)
    cut.resize_token_embeddings(LIMIT)
    sampling = Sampling(8, stop_ids=(EOS,), candidates=4, **SETTINGS[kind])
    plain = make_requests(6, sampling)
    plain = [GenerateRequest(r.key, r.tokens % LIMIT, r.sampling, r.seed) for r in plain]
    masked = Sampling(8, stop_ids=(EOS,), candidates=4, usable=UsableIds(LIMIT), **SETTINGS[kind])
    asked = [GenerateRequest(r.key, r.tokens, masked, r.seed) for r in plain]
    for got, right in zip(written(whole, asked, layout), written(cut, plain, layout), strict=True):
        assert got.tokens.tolist() == right.tokens.tolist()
        np.testing.assert_allclose(got.logprobs, right.logprobs, atol=1e-5)
        assert got.candidate_ids is not None and right.candidate_ids is not None
        assert got.candidate_ids.tolist() == right.candidate_ids.tolist()


def test_holes_and_limits_of_single_rows_count() -> None:
    """Rows of one batch may differ in what they may draw; each gets its own, and its logprob is that of its own softmax."""
    model = make_model("qwen3")
    usable = [None, UsableIds(20), UsableIds(VOCAB, tuple(range(0, VOCAB, 2)))]
    requests = [
        GenerateRequest(f"row-{i}", np.array([3, 5, 7], np.int32), Sampling(12, usable=one), seed=7)
        for i, one in enumerate([*usable] * 3)
    ]
    for request, got in zip(requests, written(model, requests, CacheLayout.PADDED), strict=True):
        one = request.sampling.usable
        ids = torch.tensor([*request.tokens, *got.tokens])[None].long()
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(request.tokens) - 1 : -1].float()
        if one is not None:
            assert one.first_unusable(got.tokens) is None
            logits = one.hide_(logits)
        right = logits.log_softmax(-1).gather(1, ids[0, len(request.tokens) :, None])[:, 0]
        np.testing.assert_allclose(got.logprobs, right.numpy(), atol=1e-4)


@pytest.mark.parametrize("dialect", list(DIALECTS))
def test_servers_are_told_which_ids_not_to_draw(dialect: str) -> None:
    sampling = Sampling(4, usable=UsableIds(8, (3,)), head_rows=10)
    assert Decoder(Sampling).decode(encode(sampling)) == sampling
    tokens = np.array([1], np.int32)

    def body(sampling: Sampling) -> dict[str, Any]:
        request = DIALECTS[dialect].body(
            PieceRequest(GenerateRequest("r", tokens, sampling, 0), tokens, 4, 0, "", "m")
        )
        return {**request, **request.get("sampling_params", {})}

    assert body(sampling)["logit_bias"] == {"3": -100.0, "8": -100.0, "9": -100.0}
    assert "logit_bias" not in body(Sampling(4))
