"""The running average of the weights, and saving in the background."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from small_student import cross_entropy, qwen3, settings, token_mean, varied_batch

from understudy.errors import CheckpointError, PolicyError
from understudy.policy.checkpoints.background import BackgroundSaver
from understudy.policy.checkpoints.checkpoint import CheckpointStore
from understudy.policy.policy import Policy


def step(policy: Policy, seed: int) -> None:
    batch = varied_batch(seed=seed)
    policy.update(batch, cross_entropy, token_mean(batch))


def test_the_weight_average_is_an_exponential_moving_average() -> None:
    policy = Policy(qwen3(), settings(ema_decay=0.9))
    expected = {name: tensor.clone() for name, tensor in policy.named_weights()}
    for seed in range(3):
        step(policy, seed)
        for name, tensor in policy.named_weights():
            expected[name] = 0.9 * expected[name] + 0.1 * tensor
    for name, tensor in policy.averaged_weights():
        assert torch.allclose(tensor, expected[name], atol=1e-6), name
        assert not torch.equal(tensor, dict(policy.named_weights())[name])


def test_the_weight_average_is_restored_from_a_checkpoint(tmp_path: Path) -> None:
    straight, first = (Policy(qwen3(), settings(ema_decay=0.5)) for _ in range(2))
    for seed in range(3):
        step(straight, seed)
    step(first, 0)
    CheckpointStore(tmp_path).save(1, first.state())
    resumed = Policy(qwen3(seed=8), settings(ema_decay=0.5))
    resumed.load_state(CheckpointStore(tmp_path).load().policy)
    for seed in (1, 2):
        step(resumed, seed)
    for (name, one), (_, other) in zip(straight.averaged_weights(), resumed.averaged_weights(), strict=True):
        assert torch.equal(one, other), name


def test_the_weight_average_of_a_low_precision_student_is_kept_in_float32() -> None:
    policy = Policy(qwen3(dtype=torch.bfloat16), settings(ema_decay=0.99))
    step(policy, 0)
    assert policy.average is not None
    assert all(value.dtype == torch.float32 for value in policy.average.values.values())
    assert all(tensor.dtype == torch.bfloat16 for _, tensor in policy.averaged_weights())


def test_the_weight_average_requires_ema_decay() -> None:
    plain = Policy(qwen3(), settings())
    with pytest.raises(PolicyError, match="set ema_decay"):
        plain.averaged_weights()
    with pytest.raises(CheckpointError, match="ema_decay"):
        Policy(qwen3(), settings(ema_decay=0.9)).load_state(plain.state())
    with pytest.raises(PolicyError, match=r"ema_decay = 1\.5"):
        Policy(qwen3(), settings(ema_decay=1.5))


class HeldStore(CheckpointStore):
    """Waits with each save until `released` is set."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.released = threading.Event()

    def save(self, *args: Any, **kwargs: Any) -> Path:
        assert self.released.wait(60)
        return super().save(*args, **kwargs)


def test_a_background_save_writes_the_state_as_it_was_when_save_was_called(tmp_path: Path) -> None:
    policy = Policy(qwen3(), settings())
    step(policy, 0)
    store = HeldStore(tmp_path)
    saver = BackgroundSaver(store)
    kept = {name: tensor.clone() for name, tensor in policy.named_weights()}
    saver.save(1, policy.state(), {"cursor": 1})
    step(policy, 1)
    store.released.set()
    assert saver.wait() == tmp_path / "step-000001"
    assert saver.wait() is None
    checkpoint = CheckpointStore(tmp_path).load()
    assert checkpoint.extra == {"cursor": 1} and checkpoint.policy.progress["step"] == 1
    assert all(torch.equal(checkpoint.policy.model[name], tensor) for name, tensor in kept.items())
    saver.save(2, policy.state())
    saver.close()
    assert CheckpointStore(tmp_path).load().step == 2


def test_an_error_of_a_background_save_is_raised_by_the_next_save(tmp_path: Path) -> None:
    policy = Policy(qwen3(), settings())
    saver = BackgroundSaver(CheckpointStore(tmp_path / "folder"))
    (tmp_path / "folder").write_text("not a folder")
    saver.save(0, policy.state())
    with pytest.raises((CheckpointError, OSError)):
        saver.save(1, policy.state())
    saver.close()
