"""One replica over two real processes: the same scores as one process for every signal, and no process left behind."""

import asyncio
import signal
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from teacher_rig import TOKEN, Child, ReplicaForkServer, random_items, write_model

from understudy.errors import TeacherError
from understudy.teacher.clients.native import ReplicaClient
from understudy.teacher.protocol import request_of
from understudy.teacher.replica.server import main
from understudy.teacher.replica.tensor_parallel import ReplicaRank, shard_layers
from understudy.teacher.scoring.model import load_frozen, weights_sha256
from understudy.teacher.scoring.scorer import Scorer
from understudy.types.scores import ScoreItem, Signal, TeacherScores


def two_processes(fork_server: ReplicaForkServer, model: Path, folder: Path, *options: str) -> list[Child]:
    rendezvous = ["--world-size", "2", "--rendezvous", f"file://{folder}/meet", *options]
    return [fork_server.fork(model, ["--rank", str(rank), *rendezvous]) for rank in range(2)]


def all_signals() -> list[ScoreItem]:
    prompt = np.arange(20, dtype=np.int32)
    tails = [np.array(tail, np.int32) for tail in ([5, 6], [7], [8, 9, 10], [11, 3])]
    siblings = [
        ScoreItem(
            f"sibling-{i}",
            np.concatenate([prompt, tail]),
            np.arange(18, 20 + len(tail), dtype=np.int32),
            Signal.TOPK,
            4,
        )
        for i, tail in enumerate(tails)
    ]
    return [
        *random_items(6, 1, Signal.TOPK, 8),
        *random_items(2, 2, Signal.SAMPLED),
        *random_items(3, 3, Signal.AT_IDS, 5),
        *random_items(2, 4, Signal.HIDDEN),
        *random_items(1, 5, Signal.TOPK, 40),  # more ids than either half of the vocabulary has
        *siblings,
    ]


@pytest.mark.parametrize(
    ("kind", "changes", "options"),
    [
        ("qwen3", {"tie_word_embeddings": True}, []),
        ("llama", {"attention_bias": True}, ["--layout", "packed"]),
        ("qwen3_moe", {}, ["--layout", "packed"]),
        pytest.param("qwen2_moe", {}, [], marks=pytest.mark.slow),
        pytest.param("mixtral", {}, [], marks=pytest.mark.slow),
        pytest.param("olmoe", {}, [], marks=pytest.mark.slow),
    ],
)
def test_two_tensor_parallel_processes_score_like_one_process(
    kind: str, changes: dict[str, bool], options: list[str], tmp_path: Path, fork_server: ReplicaForkServer
) -> None:
    model = write_model(tmp_path / "model", kind, seed=3, **changes)
    frozen = load_frozen(str(model))
    right = Scorer("math", frozen).score(request_of(all_signals())).split()
    processes = two_processes(fork_server, model, tmp_path, *options)

    async def ask() -> tuple[list[TeacherScores], str, tuple[int, ...]]:
        async with ReplicaClient((await processes[0].ready()).url, TOKEN) as client:
            scores = [await client.score(all_signals()) for _ in range(2)][1]
            return scores, (await client.manifest()).weights_sha256, (await client.head()).weight_VH.shape

    scores, digest, head_shape = asyncio.run(ask())
    assert digest == weights_sha256(frozen.model) and head_shape == (61, 32)
    for got, expected in zip(scores, right, strict=True):
        np.testing.assert_allclose(got.sampled_logprobs, expected.sampled_logprobs, atol=1e-4)
        if expected.logprobs is not None:
            np.testing.assert_array_equal(got.ids, expected.ids)
            np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=1e-4)
        if expected.hidden is not None:
            assert got.hidden is not None and got.hidden.shape == expected.hidden.shape
    processes[0].signal(signal.SIGTERM)
    assert [process.exit_code() for process in processes] == [0, 0]


def test_tensor_parallel_ranks_serve_small_requests_between_the_parts_of_a_large_one(
    tmp_path: Path, fork_server: ReplicaForkServer
) -> None:
    """Both ranks run the same forwards in the same order, and each reply has the bits of a single request."""
    model = write_model(tmp_path / "model")
    processes = two_processes(fork_server, model, tmp_path, "--max-batch-tokens", "64")
    large = random_items(80, 1, Signal.SAMPLED)
    small = [random_items(1, seed, Signal.TOPK, 8) for seed in range(2, 6)]

    async def ask() -> int:
        async with ReplicaClient((await processes[0].ready()).url, TOKEN) as client:
            alone = [await client.score(items) for items in (large, *small)]
            whole = asyncio.create_task(client.score(large))
            served = 0
            while not whole.done():
                for expected, items in zip(alone[1:], small, strict=True):
                    same_bits(await client.score(items), expected)
                    served += not whole.done()
            same_bits(await whole, alone[0])
            return served

    assert asyncio.run(ask()) > 1
    processes[0].signal(signal.SIGTERM)
    assert [process.exit_code() for process in processes] == [0, 0]


def same_bits(got: Sequence[TeacherScores], expected: Sequence[TeacherScores]) -> None:
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one.sampled_logprobs, other.sampled_logprobs)
        np.testing.assert_array_equal(one.ids, other.ids)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)


def test_the_other_rank_exits_when_one_is_killed(tmp_path: Path, fork_server: ReplicaForkServer) -> None:
    model = write_model(tmp_path / "model")
    processes = two_processes(fork_server, model, tmp_path)
    asyncio.run(processes[0].ready())
    processes[0].signal(signal.SIGKILL)
    assert processes[1].exit_code() != 0


def test_shapes_that_cannot_be_divided_and_invalid_rank_arguments_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = load_frozen(str(write_model(tmp_path / "model"))).model
    with pytest.raises(TeacherError, match="num_attention_heads = 4 cannot be cut into 3 equal parts"):
        shard_layers(model, ReplicaRank(0, 3))
    uneven = write_model(tmp_path / "experts", "qwen3_moe", moe_intermediate_size=23)
    with pytest.raises(TeacherError, match="the experts' inner size 23 cannot be cut into 2 equal parts"):
        shard_layers(load_frozen(str(uneven)).model, ReplicaRank(0, 2))
    assert main(["--name", "m", "--model", str(tmp_path / "model"), "--world-size", "2"]) == 2
    assert "needs --rendezvous" in capsys.readouterr().err
    assert main(["--name", "m", "--model", str(tmp_path / "model"), "--rank", "1"]) == 2
    assert "expected 0 … 0" in capsys.readouterr().err
