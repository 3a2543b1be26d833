"""Ids without a token are never drawn or reported."""

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


def generated(model: Any, requests: list[GenerateRequest], layout: CacheLayout) -> list[Generation]:
    async def run() -> list[Generation]:
        async with engine_over(model, layout=layout) as engine:
            return await engine.generate(requests)

    return asyncio.run(run())


@pytest.mark.parametrize("layout", [CacheLayout.PADDED, CacheLayout.SLOTS])
@pytest.mark.parametrize("kind", list(SETTINGS))
def test_an_engine_with_unusable_ids_equals_one_whose_model_lacks_their_rows(
    kind: str, layout: CacheLayout
) -> None:
    whole = make_model("qwen3-16")
    cut = copy.deepcopy(whole)
    cut.resize_token_embeddings(LIMIT)
    sampling = Sampling(8, stop_ids=(EOS,), candidates=4, **SETTINGS[kind])
    plain = make_requests(6, sampling)
    plain = [GenerateRequest(r.key, r.tokens % LIMIT, r.sampling, r.seed) for r in plain]
    masked = Sampling(8, stop_ids=(EOS,), candidates=4, usable=UsableIds(LIMIT), **SETTINGS[kind])
    masked_requests = [GenerateRequest(r.key, r.tokens, masked, r.seed) for r in plain]
    for got, expected in zip(
        generated(whole, masked_requests, layout), generated(cut, plain, layout), strict=True
    ):
        assert got.tokens.tolist() == expected.tokens.tolist()
        np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=1e-5)
        assert got.candidate_ids is not None and expected.candidate_ids is not None
        assert got.candidate_ids.tolist() == expected.candidate_ids.tolist()


def test_each_row_of_a_batch_draws_only_from_its_own_usable_ids() -> None:
    """Its log-probabilities are those of a softmax over its own usable ids."""
    model = make_model("qwen3")
    usable = [None, UsableIds(20), UsableIds(VOCAB, tuple(range(0, VOCAB, 2)))]
    requests = [
        GenerateRequest(f"row-{i}", np.array([3, 5, 7], np.int32), Sampling(12, usable=one), seed=7)
        for i, one in enumerate([*usable] * 3)
    ]
    for request, got in zip(requests, generated(model, requests, CacheLayout.PADDED), strict=True):
        one = request.sampling.usable
        ids = torch.tensor([*request.tokens, *got.tokens])[None].long()
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(request.tokens) - 1 : -1].float()
        if one is not None:
            assert one.first_unusable(got.tokens) is None
            logits = one.hide_(logits)
        expected = logits.log_softmax(-1).gather(1, ids[0, len(request.tokens) :, None])[:, 0]
        np.testing.assert_allclose(got.logprobs, expected.numpy(), atol=1e-4)


@pytest.mark.parametrize("dialect", list(DIALECTS))
def test_requests_to_servers_forbid_unusable_ids_by_logit_bias(dialect: str) -> None:
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
