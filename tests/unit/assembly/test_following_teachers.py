"""Teachers that follow the student: publishes that fail or are cancelled, and which earlier weights are kept."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from understudy.assembly.teachers.following import EarlierWeights, SelfTeachers
from understudy.assembly.teachers.launchers import EngineTeachers
from understudy.assembly.teachers.running import Teachers
from understudy.errors import EngineError
from understudy.serving.endpoint import Endpoint
from understudy.teacher.manifest import Limits, Manifest
from understudy.teacher.pool.launch import ReplicaSpec
from understudy.teacher.pool.options import PoolOptions
from understudy.teacher.pool.pool import TeacherPool
from understudy.trainers.pacing.publish_gate import PublishGate
from understudy.types.scores import ScoreItem, Signal, TeacherScores
from understudy.weights import snapshots
from understudy.weights.snapshots import Snapshots

MANIFEST = Manifest(
    "me", "native", "m", "aa", "ff", 61, 32, "float32", list(Signal), Limits(max_length=100, max_k=20)
)


class Replica:
    """Client and launcher of one replica, whose version is the last one it was sent."""

    version = -1

    async def start(self, replica: str) -> Endpoint:
        return Endpoint("http://replica", "token")

    async def stop(self, replica: str) -> None:
        return

    def alive(self, replica: str) -> bool:
        return True

    def end_of_log(self, replica: str) -> str:
        return ""

    async def manifest(self) -> Manifest:
        return msgspec.structs.replace(MANIFEST, version=self.version)

    async def score(self, items: Sequence[ScoreItem], timeout: float | None = None) -> list[TeacherScores]:
        return [
            TeacherScores(
                i.key, "me", i.signal, np.full(len(i.positions), -2.0, np.float32), version=self.version
            )
            for i in items
        ]

    async def close(self) -> None:
        return


@pytest.mark.parametrize("cancelled", [False, True])
def test_rows_wait_and_manifests_remain_after_a_publish_to_a_self_teacher_failed_or_was_cancelled(
    cancelled: bool,
) -> None:
    """Before, rows continued without a teacher, so that each became a dead letter, and the manifests for the checkpoint
    were lost. A stopping run cancels a publish that it cannot wait for."""
    replica, under_way = Replica(), asyncio.Event()

    class Following:
        async def send(self, version: int, tensors: Any, replicas: Sequence[str]) -> Mapping[str, str]:
            if version == 1:
                under_way.set()
                await asyncio.sleep(60 if cancelled else 0)
                raise EngineError("no space left on device")
            replica.version = version
            return {}

    async def run() -> None:
        pool = TeacherPool(
            "me", [ReplicaSpec("0")], replica, connect=lambda *_: replica, options=PoolOptions(canary=False)
        )
        await pool.start()
        policy: Any = SimpleNamespace(named_weights=lambda: [("w", torch.zeros(1))])
        following: Any = {"me": Following()}
        own = SelfTeachers(
            {"me": "live"}, {"me": pool}, following, policy, EarlierWeights(Path(), list), 1, PublishGate()
        )
        await own.publish(0)
        publish = asyncio.create_task(own.publish(1))
        await under_way.wait()
        row = asyncio.create_task(own.gate.enter().__aenter__())
        if cancelled:
            publish.cancel()
        await asyncio.wait({publish})
        assert publish.cancelled() or isinstance(publish.exception(), EngineError)
        await asyncio.wait({row}, timeout=0.05)
        assert not row.done(), "the row waits for the next launch"
        assert pool.manifest.version == 0
        row.cancel()
        await pool.close()

    asyncio.run(run())


def test_earlier_weights_are_kept_for_checkpoints_inside_a_window(tmp_path: Path) -> None:
    """With two steps per publish and a teacher one publish behind, a run resumed from step 5 published last at step 4,
    and its teacher has the weights of step 2."""
    earlier = EarlierWeights(tmp_path, lambda: [5])
    for version in (0, 2, 4, 6, 8):
        earlier.save(version, [("w", torch.full((1,), float(version)))], publishes=1, every=2)
    found = sorted(path.name for path in tmp_path.iterdir())
    assert found == ["v2.safetensors", "v4.safetensors", "v6.safetensors", "v8.safetensors"]
    assert earlier.load(2)[0][1].item() == 2.0


def test_removing_and_adding_a_replica_in_an_engine_process_does_not_replace_that_process() -> None:
    """Before, a healthy engine process was replaced, or the replica could not be added again."""
    hosts, replaced = ["engine 0", "engine 1"], list[str]()

    class Engine:
        def __init__(self) -> None:
            self.hosts = hosts

        async def serving(self, host: str) -> Endpoint:
            return Endpoint(f"http://{host}", "token")

        def process_of(self, host: str) -> Any:
            return SimpleNamespace(alive=True) if host not in processes else processes[host]

        def replace(self, host: str, reason: str) -> None:
            replaced.append(host)

    processes = {host: SimpleNamespace(alive=True) for host in hosts}

    async def run() -> None:
        engine: Any = Engine()
        launcher = EngineTeachers(SimpleNamespace(end_of_log=lambda name: ""), "base", engine, 0)  # type: ignore[arg-type]
        replica = Replica()
        pool = TeacherPool(
            "base",
            [ReplicaSpec("0"), ReplicaSpec("1")],
            launcher,
            connect=lambda *_: replica,
            options=PoolOptions(canary=False),
        )
        await pool.start()
        teachers = Teachers({"base": pool}, launchers={"base": launcher})
        for gone in ("0", "1"):
            await teachers.remove("base", gone)
            assert await teachers.add("base") == gone
        assert replaced == []
        await pool.close()

    asyncio.run(run())


def test_a_snapshot_folder_reserves_its_memory_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With memory for one and a half teachers, the second teacher's folder is on a disk."""
    monkeypatch.setattr(snapshots, "_MEMORY", tmp_path)
    size = 1 << 30
    free = SimpleNamespace(free=3 * size + (100 << 20))
    monkeypatch.setattr(snapshots.shutil, "disk_usage", lambda _: free)
    first, second = Snapshots(size), Snapshots(size)
    assert first.folder.parent == tmp_path and second.folder.parent != tmp_path
    first.close()
    third = Snapshots(size)
    assert third.folder.parent == tmp_path
    second.close()
    third.close()
