"""SIGKILL at named points and at random times: a complete checkpoint always loads, not older than the last save.

Zero failures in n random trials bound the failure rate at 95 % confidence by 1 − 0.05^(1/n): 6 trials ≤ 39 %,
60 trials ≤ 4.9 %. The named points lie between every two writes and do not depend on chance.
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
from saving_child import save_until_killed, state_of

from understudy.policy.checkpoints.checkpoint import Checkpoint, CheckpointStore

FORKS = multiprocessing.get_context("forkserver")
# One fork server serves the whole test process, so every test module that uses it preloads the same list.
FORKS.set_forkserver_preload(
    ["torch.distributed.fsdp", "safetensors.torch"]
    + [f"transformers.models.{name}.modeling_{name}" for name in ("qwen3", "llama", "gemma2")]
)

BEFORE_LATEST_IS_SET = [
    "checkpoint.before_model",
    "checkpoint.before_optimizer",
    "checkpoint.before_state",
    "checkpoint.before_manifest",
    "checkpoint.before_rename",
    "checkpoint.before_latest",
]
AFTER_LATEST_IS_SET = ["checkpoint.before_prune", "checkpoint.saved"]


def start_saving(root: Path, fault: str = "") -> tuple[multiprocessing.process.BaseProcess, Connection]:
    reader, writer = FORKS.Pipe(duplex=False)
    child = FORKS.Process(target=save_until_killed, args=(str(root), fault, writer))
    child.start()
    writer.close()
    return child, reader


def last_acknowledged(reader: Connection) -> int:
    """The last step that the child reported as saved; reading ends when the child's end of the pipe is closed."""
    last = 0
    try:
        while True:
            last = reader.recv()
    except (EOFError, ConnectionResetError):
        return last


def assert_complete(checkpoint: Checkpoint) -> None:
    expected = state_of(checkpoint.step)
    for name, tensor in {**expected.model, **expected.optimizer}.items():
        assert torch.equal(tensor, {**checkpoint.policy.model, **checkpoint.policy.optimizer}[name]), name
    assert checkpoint.policy.progress["step"] == checkpoint.step == checkpoint.extra["cursor"]


@pytest.mark.parametrize("fault", BEFORE_LATEST_IS_SET + AFTER_LATEST_IS_SET)
def test_the_newest_complete_checkpoint_loads_after_a_kill_at_each_point_of_a_save(
    tmp_path: Path, fault: str
) -> None:
    child, reader = start_saving(tmp_path, f"{fault}:3")
    child.join(timeout=120)
    assert child.exitcode == -signal.SIGKILL
    acknowledged = last_acknowledged(reader)
    assert acknowledged == 2
    store = CheckpointStore(tmp_path)
    checkpoint = store.load()
    assert_complete(checkpoint)
    assert checkpoint.step == (3 if fault in AFTER_LATEST_IS_SET else 2)
    assert checkpoint.skipped == ()
    store.recover()
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
    store.save(3, state_of(3), {"cursor": 3})
    assert_complete(store.load())


def test_recover_restores_a_checkpoint_after_a_kill_while_its_step_is_saved_again(tmp_path: Path) -> None:
    """Saving a step again first moves its old folder aside; a kill before the new one is in place must not lose it."""
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        store.save(step, state_of(step), {"cursor": step})
    (tmp_path / "latest").write_text("step-000001\n")
    child, reader = start_saving(tmp_path, "checkpoint.before_rename:1")
    child.join(timeout=120)
    assert child.exitcode == -signal.SIGKILL and last_acknowledged(reader) == 0
    assert not (tmp_path / "step-000002").exists()
    assert_complete(store.load())
    store.recover()
    assert store.steps() == [1, 2]
    assert_complete(store.load(2))


def kill_at_random_times(root: Path, seed: int) -> int:
    """One trial: kills the saving child at a seeded time, three times in the same folder; returns the last
    saved step."""
    times = random.Random(seed)
    reached = 0
    for _ in range(3):
        child, reader = start_saving(root)
        try:
            assert reader.poll(120), "the child saved nothing"
            time.sleep(times.uniform(0.0, 0.08))
            os.kill(child.pid or 0, signal.SIGKILL)
        finally:
            child.kill()
            child.join(timeout=60)
        acknowledged = last_acknowledged(reader)
        checkpoint = CheckpointStore(root).load()
        assert_complete(checkpoint)
        assert acknowledged <= checkpoint.step <= acknowledged + 1, f"seed {seed}"
        assert acknowledged > reached
        reached = checkpoint.step
    return reached


@pytest.mark.parametrize("seed", range(2))
def test_a_complete_checkpoint_loads_after_kills_at_random_times(tmp_path: Path, seed: int) -> None:
    assert kill_at_random_times(tmp_path, seed) >= 3


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(100, 120))
def test_a_complete_checkpoint_loads_after_kills_at_many_random_times(tmp_path: Path, seed: int) -> None:
    assert kill_at_random_times(tmp_path, seed) >= 3
