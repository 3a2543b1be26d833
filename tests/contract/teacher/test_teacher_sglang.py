"""A real SGLang as a teacher. UNDERSTUDY_SGLANG_PYTHON names the Python that can import sglang."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from real_servers import serving_sglang
from teacher_rig import VOCAB, random_items, write_model
from test_teacher_backends import assert_plain, using

import understudy
from understudy.errors import UnderstudyError
from understudy.serving.endpoint import Endpoint
from understudy.teacher.clients.completions import Capabilities, CompletionsClient, Route
from understudy.teacher.clients.discover import Backend, connect_external
from understudy.teacher.clients.http import RequestRefused
from understudy.teacher.clients.native import ScoringClient
from understudy.teacher.manifest import Manifest
from understudy.teacher.pool.integrity import identify
from understudy.types.scores import ScoreItem, Signal, TeacherScores
from understudy.types.usable_ids import UsableIds

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]

KEY = "a-key"
ATOL = 1e-4
"""Tolerance between SGLang's float32 on a CPU and a float64 forward."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("sglang") / "model", "qwen3", hidden_size=64)


@pytest.fixture(scope="module")
def sglang(served: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("sglang-log") / "log.txt"
    with serving_sglang(served, log, ["--api-key", KEY]) as url:
        yield url


def client(url: str, **changes: object) -> CompletionsClient:
    return CompletionsClient(url, KEY, teacher="math", replica="a", vocab_size=VOCAB, **changes)


def scores_of(url: str, items: list[ScoreItem], **changes: object) -> list[TeacherScores]:
    scores = using(client(url, **changes), lambda c: c.score(items))
    assert isinstance(scores, list)
    return scores


def test_sglang_scores_equal_a_plain_forward(sglang: str, served: Path) -> None:
    """Rows of unequal length arrive together, some scored from the first position on, some from the middle."""
    items = random_items(12, 1, Signal.TOPK, 8) + random_items(8, 2, Signal.SAMPLED, lengths=(3, 200))
    assert_plain(served, items, scores_of(sglang, items), ATOL)


def test_many_rows_at_once_score_like_a_plain_forward(sglang: str, served: Path) -> None:
    items = random_items(64, 3, Signal.TOPK, 5, lengths=(20, 120))
    assert_plain(served, items, scores_of(sglang, items, in_flight=64), ATOL)


def test_first_last_and_single_positions_score_like_a_plain_forward(sglang: str, served: Path) -> None:
    tokens = np.random.default_rng(4).integers(0, VOCAB, 50).astype(np.int32)
    chosen = ([1], [49], [1, 49], [7], list(range(1, 50)), list(range(40, 50)))
    items = [
        ScoreItem(f"row-{i}", tokens, np.array(positions, np.int32), Signal.TOPK, 3)
        for i, positions in enumerate(chosen)
    ]
    assert_plain(served, items, scores_of(sglang, items), ATOL)


def test_the_last_id_of_the_vocabulary_scores_like_a_plain_forward(sglang: str, served: Path) -> None:
    """SGLang reports it as id 0 in its answer."""
    tokens = np.array([3, VOCAB - 1, 5, VOCAB - 1, VOCAB - 1, 0], np.int32)
    item = ScoreItem("row", tokens, np.arange(1, 6, dtype=np.int32), Signal.TOPK, 2)
    assert_plain(served, [item], scores_of(sglang, [item]), ATOL)


def test_prefix_caching_does_not_change_the_scores(sglang: str, served: Path) -> None:
    """The same row is scored again, also from an earlier position, and so are rows that share its prefix."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, 120).astype(np.int32)
    rows = [
        tokens,
        tokens,
        np.concatenate([tokens[:90], rng.integers(0, VOCAB, 30).astype(np.int32)]),
        tokens,
    ]
    firsts = (100, 100, 80, 1)

    async def in_turn(c: ScoringClient) -> list[TeacherScores]:
        return [(await c.score([item]))[0] for item in items]

    items = [
        ScoreItem(f"row-{i}", row, np.arange(first, 120, dtype=np.int32), Signal.TOPK, 4)
        for i, (row, first) in enumerate(zip(rows, firsts, strict=True))
    ]
    scores = using(client(sglang), in_turn)
    assert isinstance(scores, list)
    assert_plain(served, items, scores, ATOL)


def test_the_probe_finds_the_recipes_k_and_detects_the_backend(sglang: str) -> None:
    for k, most in ((0, 32), (7, 7), (VOCAB, VOCAB)):
        found = using(client(sglang, k=k), lambda c: c.capabilities())  # type: ignore[attr-defined]
        assert isinstance(found, Capabilities)
        assert (found.route, found.max_k) == (Route.RETURN_LOGPROB, most)
    for backend in (Backend.AUTO, Backend.SGLANG):
        connect = connect_external(VOCAB, backend=backend, k=7)
        manifest = using(connect("math", "a", Endpoint(f"{sglang}/v1", KEY)), lambda c: c.manifest())
        assert isinstance(manifest, Manifest)
        assert (manifest.backend, manifest.limits.max_length, manifest.limits.max_k) == ("sglang", 256, 7)


def test_unsupported_k_wrong_token_and_long_rows_are_refused_with_the_reason(sglang: str) -> None:
    with pytest.raises(RequestRefused, match="k = 8; this server gives sampled, topk with k ≤ 7"):
        scores_of(sglang, random_items(1, 0, Signal.TOPK, 8), k=7)
    with pytest.raises(RequestRefused, match="401"):
        connect = connect_external(VOCAB)
        using(connect("math", "a", Endpoint(sglang, "wrong")), lambda c: c.manifest())
    with pytest.raises(RequestRefused, match="longer than the model's context length"):
        scores_of(sglang, random_items(1, 0, Signal.SAMPLED, lengths=(300, 301)))


def test_an_unusable_sglang_candidate_refuses_only_its_row(sglang: str) -> None:
    few = [
        ScoreItem(one.key, one.tokens % 8, one.positions, one.signal, one.k)
        for one in random_items(2, 0, Signal.TOPK, 5)
    ]
    with pytest.raises(RequestRefused, match=r"row 'row-0-0': the teacher's candidate \d+ is not an id"):
        scores_of(sglang, few, usable=UsableIds(8))


def test_repeated_identification_gives_the_same_probe_scores(sglang: str) -> None:
    async def run() -> None:
        asked = client(sglang)
        first, second = await identify(asked), await identify(asked)
        assert len(first.probe_logprobs) == 11
        np.testing.assert_allclose(first.probe_logprobs, second.probe_logprobs, atol=1e-5)
        await asked.close()

    asyncio.run(run())


def test_a_run_with_an_sglang_teacher_equals_a_run_with_a_native_replica(
    sglang: str, served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_KEY", KEY)
    student = write_model(tmp_path / "student", "qwen3", seed=7)
    config = json.loads((student / "tokenizer_config.json").read_text())
    (student / "tokenizer_config.json").write_text(
        json.dumps({**config, "tokenizer_class": "PreTrainedTokenizerFast"})
    )
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "t{i}"}}\n' for i in range(30, 46)))
    table: dict[str, object] = {
        "student": {"model": str(student)},
        "data": {"train": str(tmp_path / "rows.jsonl")},
        "loss": {"topk": 8},
        "rollout": {"max_new_tokens": 6},
        "trainer": {"steps": 2, "batch_size": 8, "learning_rate": 1e-3},
    }
    outside = {
        "model": str(served),
        "placement": "external",
        "urls": [f"{sglang}/v1"],
        "token_env": "SGLANG_KEY",
    }
    runs = [
        understudy.train(
            {**table, "teachers": {"t": teacher}, "run": {"dir": str(tmp_path / name)}}, progress=False
        )
        for name, teacher in (("theirs", outside), ("ours", {"model": str(served)}))
    ]
    for theirs, ours in zip(runs[0].metrics, runs[1].metrics, strict=True):
        assert theirs["actor/loss"] == pytest.approx(ours["actor/loss"], abs=1e-4)
    assert "served by sglang" in (tmp_path / "theirs" / "logs" / "trainer.log").read_text()
    refused = {**table, "loss": {"signal": "hidden"}, "teachers": {"t": outside}}
    with pytest.raises(UnderstudyError, match="cannot give hidden; its sglang backend offers sampled, topk"):
        understudy.train({**refused, "run": {"dir": str(tmp_path / "never")}}, progress=False)
