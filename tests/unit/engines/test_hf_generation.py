"""The in-process engine compared with an independently written forward loop without a cache."""

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from engine_models import EOS, VOCAB, engine_over, make_model, make_requests
from reference_sampling import generate_plainly

from understudy.engines.base import GenerateRequest, Generation, Sampling
from understudy.engines.local.engine import HFEngine
from understudy.errors import EngineError
from understudy.types.trajectory import StopReason

PLAIN = Sampling(max_new_tokens=12, stop_ids=(EOS,))
SETTINGS = {
    "plain": PLAIN,
    "greedy": Sampling(12, (EOS,), temperature=0.0),
    "cold": Sampling(12, (EOS,), temperature=0.6),
    "top_k": Sampling(12, (EOS,), temperature=1.5, top_k=5),
    "top_p": Sampling(12, (EOS,), top_p=0.7),
    "min_p": Sampling(12, (EOS,), min_p=0.2),
    "penalty": Sampling(12, (EOS,), repetition_penalty=1.8),
    "everything": Sampling(
        12, (EOS, 7), temperature=1.3, top_k=20, top_p=0.8, min_p=0.02, repetition_penalty=1.2
    ),
}


def run(model: Any, requests: list[GenerateRequest], **settings: Any) -> list[Generation]:
    async def body() -> list[Generation]:
        async with engine_over(model, **settings) as engine:
            return await engine.generate(requests)

    return asyncio.run(body())


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_and_logprobs_equal_a_plain_forward_loop(name: str) -> None:
    model = make_model("qwen3")
    requests = make_requests(6, SETTINGS[name])
    for request, generation in zip(requests, run(model, requests), strict=True):
        tokens, logprobs = generate_plainly(model, request)
        assert generation.tokens.tolist() == tokens
        np.testing.assert_allclose(generation.logprobs, logprobs, atol=2e-5)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_tokens_and_logprobs_of_llama_and_gemma3_equal_a_plain_forward_loop(family: str) -> None:
    model = make_model(family)
    requests = make_requests(8, PLAIN)
    for request, generation in zip(requests, run(model, requests), strict=True):
        tokens, logprobs = generate_plainly(model, request)
        assert generation.tokens.tolist() == tokens
        np.testing.assert_allclose(generation.logprobs, logprobs, atol=2e-5)


def test_requests_with_different_sampling_settings_share_a_batch() -> None:
    model = make_model("qwen3")
    plain = make_requests(len(SETTINGS), PLAIN)
    requests = [
        GenerateRequest(r.key, r.tokens, sampling, r.seed)
        for r, sampling in zip(plain, SETTINGS.values(), strict=True)
    ]
    for request, generation in zip(requests, run(model, requests), strict=True):
        assert generation.tokens.tolist() == generate_plainly(model, request)[0]


def test_logprobs_match_a_teacher_forced_forward() -> None:
    """As the trainer computes them: on the finished row, all positions at once."""
    model = make_model("qwen3")
    requests = make_requests(16, PLAIN)
    for request, generation in zip(requests, run(model, requests), strict=True):
        ids = torch.tensor([[*request.tokens.tolist(), *generation.tokens.tolist()]])
        with torch.no_grad():
            logprobs = model(input_ids=ids).logits[0].float().log_softmax(-1)
        predicted = logprobs[len(request.tokens) - 1 : -1].gather(1, ids[0, len(request.tokens) :, None])[
            :, 0
        ]
        np.testing.assert_allclose(generation.logprobs, predicted.numpy(), atol=1e-5)


def test_tokens_do_not_depend_on_other_rows_of_the_batch() -> None:
    """Alone, all together (with padding), in reverse order, and in small batches that rows join and leave."""
    model = make_model("qwen3")
    requests = make_requests(12, PLAIN)
    together = run(model, requests)
    backwards = run(model, requests[::-1])[::-1]
    small = run(model, requests, max_batch=5)
    squeezed = run(model, requests, prefill_tokens=16)
    for i, request in enumerate(requests):
        (alone,) = run(model, [request])
        for other in (together[i], backwards[i], small[i], squeezed[i]):
            assert other.tokens.tolist() == alone.tokens.tolist()
            assert other.stop_reason is alone.stop_reason
            np.testing.assert_allclose(other.logprobs, alone.logprobs, atol=2e-5)


def test_tokens_are_correct_when_the_kv_cache_grows() -> None:
    model = make_model("qwen3")
    (request,) = make_requests(1, Sampling(110, temperature=0.0))
    (generation,) = run(model, [request])
    assert generation.tokens.tolist() == generate_plainly(model, request)[0]


def test_the_same_batch_gives_the_same_bits() -> None:
    model = make_model("qwen3")
    requests = make_requests(24, PLAIN)
    for settings in ({}, {"max_batch": 5}):
        first, second = run(model, requests, **settings), run(model, requests, **settings)
        for a, b in zip(first, second, strict=True):
            assert a.logprobs.tobytes() == b.logprobs.tobytes()


def test_another_seed_gives_other_tokens() -> None:
    model = make_model("qwen3")
    (request,) = make_requests(1, Sampling(20))
    other = GenerateRequest(request.key, request.tokens, request.sampling, request.seed + (1 << 40))
    first, second = run(model, [request, other])
    assert first.tokens.tolist() != second.tokens.tolist(), "the high bits of a seed must count"


def test_generations_end_with_the_stop_token_or_at_the_limit_and_report_which() -> None:
    model = make_model("qwen3")
    generations = run(model, make_requests(64, Sampling(40, (EOS,), temperature=3.0)))
    reasons = Counter(generation.stop_reason for generation in generations)
    assert set(reasons) == {StopReason.EOS, StopReason.LENGTH}
    for generation in generations:
        if generation.stop_reason is StopReason.EOS:
            assert generation.tokens[-1] == EOS and EOS not in generation.tokens[:-1]
        else:
            assert len(generation.tokens) == 40 and EOS not in generation.tokens
        assert np.isfinite(generation.logprobs).all() and (generation.logprobs <= 0).all()


def test_a_pad_id_equal_to_the_stop_id_changes_no_tokens() -> None:
    model = make_model("qwen3")
    requests = make_requests(12, PLAIN)
    for a, b in zip(run(model, requests, pad_id=EOS), run(model, requests, pad_id=0), strict=True):
        assert a.tokens.tolist() == b.tokens.tolist()


def test_a_generation_ends_on_the_token_that_completes_a_stop_string() -> None:
    model = make_model("qwen3")
    letters = [chr(ord("A") + i) for i in range(VOCAB)]

    def spell(ids: Any) -> str:
        return "".join(letters[i] for i in ids)

    (request,) = make_requests(1, Sampling(30))
    (free,) = run(model, [request])
    stop = spell(free.tokens[5:8])
    again = GenerateRequest("stop", request.tokens, Sampling(30, stop_strings=("??", stop)), request.seed)
    (stopped,) = run(model, [again], detokenize=spell)
    first = spell(free.tokens).index(stop) + 3
    assert stopped.stop_reason is StopReason.STOP_STRING
    assert stopped.tokens.tolist() == free.tokens[:first].tolist()

    last = replace(again, sampling=replace(again.sampling, max_new_tokens=first))
    (whole,) = run(model, [last], detokenize=spell)
    assert (whole.stop_reason, len(whole.tokens)) == (StopReason.STOP_STRING, first), (
        "the stop string counts before the length limit"
    )


def test_drawn_tokens_follow_the_exact_distribution() -> None:
    """10,000 first tokens against the exact distribution, by a chi-squared bound."""
    model = make_model("qwen3")
    prompt = np.array([5, 9, 11], dtype=np.int32)
    sampling = Sampling(1, temperature=2.0, top_k=12)
    draws = 10_000
    requests = [GenerateRequest(str(i), prompt, sampling, seed=i) for i in range(draws)]
    counts = np.bincount([g.tokens[0] for g in run(model, requests, max_batch=draws)], minlength=VOCAB)
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(prompt)[None].long()).logits[0, -1] / 2.0
    kept = logits >= logits.topk(12).values[-1]
    expected = torch.where(kept, logits, -torch.inf).softmax(-1).numpy() * draws
    assert counts[~kept.numpy()].sum() == 0
    chi2 = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    assert chi2 < 35, "11 degrees of freedom: above 35 happens once in 4,000 right implementations"


@pytest.mark.parametrize(
    ("tokens", "sampling", "says"),
    [
        (np.ones(120, np.int32), Sampling(9), ["row-x", "120", "129", "128"]),
        (np.ones(0, np.int32), Sampling(9), ["row-x", "no tokens"]),
        (np.array([3, VOCAB], np.int32), Sampling(9), ["row-x", str(VOCAB)]),
        (np.array([3], np.int32), Sampling(9, stop_strings=("x",)), ["row-x", "detokenize"]),
    ],
)
def test_requests_that_cannot_be_served_are_refused_with_the_reason(
    tokens: np.ndarray, sampling: Sampling, says: list[str]
) -> None:
    with pytest.raises(EngineError) as raised:
        run(make_model("qwen3"), [GenerateRequest("row-x", tokens, sampling, 0)])
    assert all(word in str(raised.value) for word in says)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("max_new_tokens", 0),
        ("temperature", -1.0),
        ("top_p", 0.0),
        ("top_k", -1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
    ],
)
def test_the_error_about_a_wrong_sampling_setting_names_it(setting: str, value: float) -> None:
    with pytest.raises(EngineError, match=setting):
        Sampling(**{"max_new_tokens": 1, setting: value})


def test_a_model_with_linear_attention_layers_is_refused() -> None:
    model = make_model("qwen3")
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(EngineError, match="linear_attention"):
        HFEngine(model, max_batch=1, device="cpu", pad_id=0, max_length=8)
