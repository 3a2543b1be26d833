"""kill -9 at named places and at random moments: some checkpoint always loads, whole and not older than promised.

Zero failures in n random trials bound the failure rate at 95 % confidence by 1 − 0.05^(1/n): 6 trials ≤ 39 %,
60 trials ≤ 4.9 %. The named points strike between every two writes and are not a matter of luck.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from saving_child import save_for_ever, state_of

from understudy.policy.checkpoints.checkpoint import Checkpoint, CheckpointStore

FORKS = multiprocessing.get_context("forkserver")
# One fork server serves the whole test process, so every test module that uses it preloads the same list.
FORKS.set_forkserver_preload(
    ["torch.distributed.fsdp", "safetensors.torch"]
    + [f"transformers.models.{name}.modeling_{name}" for name in ("qwen3", "llama", "gemma2")]
)

BEFORE_THE_MARK = [
    "checkpoint.before_model",
    "checkpoint.before_optimizer",
    "checkpoint.before_state",
    "checkpoint.before_manifest",
    "checkpoint.before_rename",
    "checkpoint.before_latest",
]
AFTER_THE_MARK = ["checkpoint.before_prune", "checkpoint.saved"]


def start(root: Path, fault: str = "") -> tuple[multiprocessing.process.BaseProcess, Connection]:
    reader, writer = FORKS.Pipe(duplex=False)
    child = FORKS.Process(target=save_for_ever, args=(str(root), fault, writer))
    child.start()
    writer.close()
    return child, reader


def last_acknowledged(reader: Connection) -> int:
    """What the child said it had saved; its end of the pipe is closed, so reading ends by itself."""
    last = 0
    try:
        while True:
            last = reader.recv()
    except (EOFError, ConnectionResetError):
        return last


def assert_whole(checkpoint: Checkpoint) -> None:
    expected = state_of(checkpoint.step)
    for name, tensor in {**expected.model, **expected.optimizer}.items():
        assert torch.equal(tensor, {**checkpoint.policy.model, **checkpoint.policy.optimizer}[name]), name
    assert checkpoint.policy.progress["step"] == checkpoint.step == checkpoint.extra["cursor"]


@pytest.mark.parametrize("fault", BEFORE_THE_MARK + AFTER_THE_MARK)
def test_killed_at_a_named_point(tmp_path: Path, fault: str) -> None:
    child, reader = start(tmp_path, f"{fault}:3")
    child.join(timeout=120)
    assert child.exitcode == -signal.SIGKILL
    acknowledged = last_acknowledged(reader)
    assert acknowledged == 2
    store = CheckpointStore(tmp_path)
    checkpoint = store.load()
    assert_whole(checkpoint)
    assert checkpoint.step == (3 if fault in AFTER_THE_MARK else 2)
    assert checkpoint.skipped == ()
    store.recover()
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
    store.save(3, state_of(3), {"cursor": 3})
    assert_whole(store.load())


def test_killed_while_a_step_is_saved_again(tmp_path: Path) -> None:
    """The re-run of a step steps aside the old folder; a kill in between must not lose either."""
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        store.save(step, state_of(step), {"cursor": step})
    (tmp_path / "latest").write_text("step-000001\n")
    child, reader = start(tmp_path, "checkpoint.before_rename:1")
    child.join(timeout=120)
    assert child.exitcode == -signal.SIGKILL and last_acknowledged(reader) == 0
    assert not (tmp_path / "step-000002").exists()
    assert_whole(store.load())
    store.recover()
    assert store.steps() == [1, 2]
    assert_whole(store.load(2))


def strike_at_random(root: Path, seed: int) -> int:
    """One trial: kill at a seeded moment, three times over in the same folder; returns how many saves there were."""
    moments = random.Random(seed)
    reached = 0
    for _ in range(3):
        child, reader = start(root)
        try:
            assert reader.poll(120), "the child saved nothing"
            time.sleep(moments.uniform(0.0, 0.08))
            os.kill(child.pid or 0, signal.SIGKILL)
        finally:
            child.kill()
            child.join(timeout=60)
        acknowledged = last_acknowledged(reader)
        checkpoint = CheckpointStore(root).load()
        assert_whole(checkpoint)
        assert acknowledged <= checkpoint.step <= acknowledged + 1, f"seed {seed}"
        assert acknowledged > reached
        reached = checkpoint.step
    return reached


@pytest.mark.parametrize("seed", range(2))
def test_killed_at_random_moments(tmp_path: Path, seed: int) -> None:
    assert strike_at_random(tmp_path, seed) >= 3


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(100, 120))
def test_killed_at_many_random_moments(tmp_path: Path, seed: int) -> None:
    assert strike_at_random(tmp_path, seed) >= 3
