"""NCCL on one GPU: weight broadcasts, a sharded student, a teacher over two processes.

Members of a broadcast call themselves different machines, because NCCL refuses two members of one machine on one GPU.
"""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from understudy.teacher.clients.native import ReplicaClient
from understudy.teacher.protocol import request_of
from understudy.teacher.scoring.model import load_frozen
from understudy.teacher.scoring.scorer import Scorer
from understudy.types.scores import ScoreItem, Signal, TeacherScores

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
HERE = Path(__file__).parent


def environment(job: str, rank: int) -> dict[str, str]:
    """Ranks that train can share a GPU without a name of their own (`student.device = "cuda:0"`)."""
    own = {} if job == "train" else {"NCCL_HOSTID": f"machine-{rank}", "NCCL_SOCKET_IFNAME": "lo"}
    return {**os.environ, "GLOO_SOCKET_IFNAME": "lo", **own}


def start_members(job: str, size: int, folder: Path) -> list[subprocess.Popen[str]]:
    folder.mkdir(exist_ok=True)
    return [
        subprocess.Popen(
            [sys.executable, str(HERE / "nccl_member.py"), job, str(rank), str(size), str(folder)],
            env=environment(job, rank),
            stdout=subprocess.PIPE,
            stderr=(folder / f"{rank}.log").open("w"),
            text=True,
        )
        for rank in range(size)
    ]


def results_of(job: str, size: int, folder: Path, killed: int | None = None) -> list[Any]:
    found: list[Any] = []
    processes = start_members(job, size, folder)
    try:
        for rank, process in enumerate(processes):
            output, _ = process.communicate(timeout=120)
            log = (folder / f"{rank}.log").read_text()[-3000:]
            assert process.returncode == (-9 if rank == killed else 0), f"rank {rank}: {log}"
            found.append(json.loads(output.splitlines()[-1]) if output else None)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return found


def test_several_versions_broadcast_through_one_group_arrive_with_the_same_bits(tmp_path: Path) -> None:
    sent, *received = results_of("broadcast", 3, tmp_path)
    assert len(set(sent)) == 3
    assert received == [sent, sent]


def test_members_notice_one_killed_during_a_broadcast_and_form_a_new_group(tmp_path: Path) -> None:
    leader, other, _ = results_of("lose_one", 3, tmp_path, killed=2)
    for one in (leader, other):
        assert one["message"] != "nothing" and one["seconds"] < 30, one
    assert leader["again"] == other["again"], "the remaining members broadcast again by gloo and by NCCL"


def test_two_ranks_over_nccl_train_like_one_process(tmp_path: Path) -> None:
    (alone,) = results_of("train", 1, tmp_path / "alone")
    for rank in results_of("train", 2, tmp_path / "two"):
        for mine, theirs in zip(rank["lines"], alone["lines"], strict=True):
            assert mine == pytest.approx(theirs, abs=1e-4, rel=1e-4)
        assert rank["weights"] == pytest.approx(alone["weights"], rel=1e-4)


def test_a_teacher_over_two_processes_scores_like_one(world: Any, tmp_path: Path) -> None:
    model = world.model("teacher")
    rng = np.random.default_rng(3)
    items = [
        ScoreItem(
            f"{i}", rng.integers(3, 900, 40).astype(np.int32), np.arange(10, 40, dtype=np.int32), signal, k
        )
        for i, (signal, k) in enumerate([(Signal.TOPK, 8), (Signal.SAMPLED, 0), (Signal.TOPK, 8)])
    ]
    right = (
        Scorer("t", load_frozen(str(model), dtype="float32", device="cuda")).score(request_of(items)).split()
    )
    ready = tmp_path / "ready-0"
    common = [sys.executable, "-m", "understudy.teacher.replica.server", "--model", str(model), "--name", "t"]
    common += ["--dtype", "float32", "--device", "cuda:0", "--token-env", "NCCL_TEST_TOKEN"]
    common += ["--world-size", "2", "--rendezvous", f"file://{tmp_path}/meet"]
    processes = []
    for rank in range(2):
        log = (tmp_path / f"{rank}.log").open("w")
        environ = {**environment("score", rank), "NCCL_TEST_TOKEN": "secret"}
        own = ["--rank", str(rank), "--ready-file", str(tmp_path / f"ready-{rank}")]
        processes.append(subprocess.Popen([*common, *own], env=environ, stdout=log, stderr=log))

    async def ask() -> list[TeacherScores]:
        for _ in range(1200):
            if ready.exists():
                break
            assert processes[0].poll() is None, (tmp_path / "0.log").read_text()[-3000:]
            await asyncio.sleep(0.1)
        async with ReplicaClient(str(json.loads(ready.read_text())["url"]), "secret") as client:
            return [await client.score(items) for _ in range(2)][1]

    try:
        scores = asyncio.run(ask())
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for got, expected in zip(scores, right, strict=True):
        np.testing.assert_allclose(got.sampled_logprobs, expected.sampled_logprobs, atol=2e-3)
        if expected.logprobs is not None:
            np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=2e-3)
