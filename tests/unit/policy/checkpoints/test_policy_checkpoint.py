"""A checkpoint resumes the run bit for bit, and a damaged one is detected."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
from small_student import cross_entropy, qwen3, settings, token_mean, varied_batch

from understudy.dataplane.journal.rewind import settle
from understudy.dataplane.journal.schema import FILE_NAME, connect
from understudy.errors import CheckpointError
from understudy.observability.rundir import RunDir
from understudy.policy.checkpoints.checkpoint import CheckpointStore, verify
from understudy.policy.checkpoints.state import PolicyState
from understudy.policy.optim.schedule import Schedule, ScheduleKind
from understudy.policy.policy import Policy
from understudy.trainers.checkpoints import last_checkpoint

COSINE = Schedule(ScheduleKind.COSINE, peak=1e-2, total_steps=6, warmup_steps=2)


def trained(policy: Policy, first: int, last: int) -> Policy:
    for step in range(first, last):
        batch = varied_batch(seed=step)
        policy.update(batch, cross_entropy, token_mean(batch), 60)
    return policy


def small_state(value: float = 1.0, elements: int = 4) -> PolicyState:
    return PolicyState(
        {"weight": torch.full((elements,), value)},
        {"exp_avg/weight": torch.full((elements,), -value)},
        {"step": int(value)},
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kill_after", [1, 4])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(
    tmp_path: Path, kill_after: int, dtype: torch.dtype
) -> None:
    uninterrupted = trained(Policy(qwen3(dtype=dtype), settings(schedule=COSINE)), 0, 6)
    drawn = torch.rand(3)

    first = trained(Policy(qwen3(dtype=dtype), settings(schedule=COSINE)), 0, kill_after)
    store = CheckpointStore(tmp_path)
    store.save(kill_after, first.state(), {"cursor": [1, 2], "note": "π"})
    torch.rand(100)
    resumed = Policy(qwen3(seed=99, dtype=dtype), settings(schedule=COSINE))
    checkpoint = store.load()
    assert checkpoint.step == kill_after and checkpoint.extra == {"cursor": [1, 2], "note": "π"}
    resumed.load_state(checkpoint.policy)
    trained(resumed, kill_after, 6)

    one, other = uninterrupted.state(), resumed.state()
    assert one.model.keys() == other.model.keys() and one.optimizer.keys() == other.optimizer.keys()
    for name, tensor in {**one.model, **one.optimizer}.items():
        assert torch.equal(tensor, {**other.model, **other.optimizer}[name]), name
    assert other.progress["step"] == 6
    assert torch.equal(torch.rand(3), drawn)


def test_state_before_the_first_step_can_be_saved_and_loaded(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(0, Policy(qwen3(), settings()).state())
    policy = Policy(qwen3(seed=5), settings())
    policy.load_state(store.load().policy)
    assert torch.equal(policy.model.get_input_embeddings().weight, qwen3().get_input_embeddings().weight)


def test_loading_a_state_writes_into_the_existing_tensors(tmp_path: Path) -> None:
    policy = Policy(qwen3(), settings())
    shared = policy.model.get_input_embeddings().weight
    state = Policy(qwen3(seed=1), settings()).state()
    policy.load_state(state)
    assert shared.data_ptr() == policy.model.get_input_embeddings().weight.data_ptr()
    assert torch.equal(shared, state.model["model.embed_tokens.weight"])


def test_the_newest_checkpoints_and_a_marked_one_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (10, 20):
        store.save(step, small_state(step))
    store.mark("best", 10)
    for step in (30, 40):
        store.save(step, small_state(step))
    assert store.steps() == [10, 30, 40]
    assert (store.latest(), store.marked("best")) == (40, 10)
    assert store.resumable() == [30, 40], "the marked checkpoint holds back the journal"
    assert (tmp_path / "latest").read_text() == "step-000040\n"
    assert store.load(10).policy.model["weight"][0] == 10
    with pytest.raises(CheckpointError, match="at least 2"):
        CheckpointStore(tmp_path, keep=1)
    with pytest.raises(CheckpointError, match="cannot mark step 20"):
        store.mark("best", 20)


@pytest.mark.parametrize(
    "file", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"]
)
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_load_falls_back_to_the_previous_checkpoint_when_the_newest_is_damaged(
    tmp_path: Path, file: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, small_state(1))
    path = store.save(2, small_state(2)) / file
    content = path.read_bytes()
    if damage == "flip":
        middle = content.index(b"\n") if file == "manifest.json" else len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 0x5A]) + content[middle + 1 :])
    elif damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    else:
        path.unlink()
    with caplog.at_level(logging.WARNING):
        checkpoint = store.load()
    assert checkpoint.step == 1 and checkpoint.policy.model["weight"][0] == 1
    assert len(checkpoint.skipped) == 1 and "step-000002" in checkpoint.skipped[0]
    assert "trying the checkpoint before it" in caplog.text
    with pytest.raises(CheckpointError):
        store.load(2)
    with pytest.raises(CheckpointError):
        verify(tmp_path / "step-000002")


def damage(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 0xFF
    file.chmod(0o600)
    file.write_bytes(content)


def test_a_damaged_checkpoint_does_not_replace_the_intact_one_before_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run stops at step 3, between two regular checkpoints, and the checkpoint of step 3 is damaged. The next launch
    resumes from step 2 and saves step 4. Once the damaged one was kept instead of that of step 2."""
    run = RunDir(tmp_path)
    store = CheckpointStore(run.checkpoints, keep=2)
    store.save(2, small_state(2), {})
    damage(store.save(3, small_state(3), {}))
    resumed = last_checkpoint(run, keep=2)
    assert resumed is not None and resumed.step == 2
    assert "the checkpoint of step 3" in caplog.text and "is removed" in caplog.text
    damage(CheckpointStore(run.checkpoints, keep=2).save(4, small_state(4), {}))
    resumed = last_checkpoint(run, keep=2)
    assert resumed is not None and resumed.step == 2
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["latest", "step-000002"]


def test_a_resume_refuses_the_best_checkpoint_when_the_rows_after_it_are_deleted(tmp_path: Path) -> None:
    """The journal cannot return to it. Once this was found only after its metrics and the later checkpoints were cut."""
    run = RunDir(tmp_path)
    store = CheckpointStore(run.checkpoints, keep=2)
    store.save(1, small_state(1), {})
    store.mark("best", 1)
    for step in (5, 6):
        damage(store.save(step, small_state(step), {}))
    with pytest.raises(
        CheckpointError, match=r"step-000005.*That of step 1 is whole, but the rows after it are deleted"
    ):
        last_checkpoint(run, keep=2)
    assert store.steps() == [1, 5, 6]


@pytest.mark.parametrize("deleted", [False, True])
def test_a_resume_refuses_the_best_checkpoint_even_if_it_is_the_newest_intact_one(
    tmp_path: Path, deleted: bool
) -> None:
    """After a return to step 5 the best one is among the newest two again, but the journal has deleted the rows it needs."""
    run = RunDir(tmp_path)
    store = CheckpointStore(run.checkpoints, keep=2)
    store.save(1, small_state(1), {})
    store.mark("best", 1)
    newest = store.save(5, small_state(5), {})
    run.dataplane.mkdir()
    with closing(connect(run.dataplane / FILE_NAME)) as connection:
        settle(connection, 5)
    if deleted:
        shutil.rmtree(newest)
    else:
        damage(newest)
    why = r"to go on from\." if deleted else r"to go on from \(.*step-000005 is damaged"
    with pytest.raises(
        CheckpointError, match=rf"{why}.* That of step 1 is whole, but the rows after it are deleted"
    ):
        last_checkpoint(run, keep=2)
    assert store.steps() == ([1] if deleted else [1, 5])


def test_loading_without_an_intact_checkpoint_is_an_error(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        store.load()
    (store.save(1, small_state()) / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole.*manifest"):
        store.load()


def test_the_latest_file_takes_precedence_over_folders_of_later_steps(tmp_path: Path) -> None:
    """After a deliberate return to step 1, the folders of the abandoned branch must not be loaded, and are pruned first."""
    store = CheckpointStore(tmp_path, keep=2)
    store.save(1, small_state(1))
    store.save(5, small_state(5))
    store.save(2, small_state(2))
    assert store.load().step == 2
    assert store.steps() == [1, 2]


def test_the_newest_checkpoint_is_loaded_when_the_latest_file_is_invalid_or_missing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, small_state(1))
    store.save(2, small_state(2))
    (tmp_path / "latest").write_text("gibberish")
    assert store.load().step == 2
    (tmp_path / "latest").unlink()
    assert store.load().step == 2


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(3, small_state(1))
    store.save(3, small_state(2))
    assert store.load().policy.model["weight"][0] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-000003"]


def test_recover_removes_temporary_files_of_a_crash_and_restores_a_replaced_checkpoint(
    tmp_path: Path,
) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, small_state(1))
    store.save(2, small_state(2))
    (tmp_path / ".tmp-step-000003-77").mkdir()
    (tmp_path / ".tmp-step-000003-77" / "model.safetensors").write_bytes(b"half")
    (tmp_path / ".latest.77.tmp").write_text("step-0")
    (tmp_path / "step-000002").rename(tmp_path / ".replaced-step-000002-77")
    assert len(store.recover()) == 3
    assert store.load().step == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-000001", "step-000002"]


def test_loading_does_not_remove_the_temporary_folder_of_a_save_in_progress(tmp_path: Path) -> None:
    """Evaluating or exporting a live run must not clear the folder its trainer is writing."""
    CheckpointStore(tmp_path).save(1, small_state(1))
    (tmp_path / ".tmp-step-000002-77").mkdir()
    assert CheckpointStore(tmp_path).load().step == 1
    assert (tmp_path / ".tmp-step-000002-77").is_dir()
    CheckpointStore(tmp_path).save(2, small_state(2))
    assert not (tmp_path / ".tmp-step-000002-77").exists()


def test_extra_state_must_be_json(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with pytest.raises(CheckpointError, match="not plain JSON"):
        store.save(1, small_state(), {"cursor": object()})
    assert store.steps() == []


def test_too_little_space_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, small_state(1))
    nearly_full = type("Usage", (), {"free": 1000})()
    monkeypatch.setattr("understudy.policy.checkpoints.checkpoint.shutil.disk_usage", lambda _: nearly_full)
    with pytest.raises(CheckpointError, match=r"needs 0\.001 GB and .* has 0\.000 GB free"):
        store.save(2, small_state(2))
    assert store.load().step == 1


DISK_FULL = """
import resource, signal, sys
import torch
from understudy.errors import CheckpointError
from understudy.observability.rundir import RunDir
from understudy.policy.checkpoints.checkpoint import CheckpointStore
from understudy.policy.checkpoints.state import PolicyState
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = CheckpointStore(sys.argv[1])
store.save(1, PolicyState({"weight": torch.ones(64)}, {}, {"step": 1}))
for room in (100_000, 600_000):  # the first file fails, then the second
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
    try:
        store.save(2, PolicyState({"weight": torch.ones(100_000)}, {"exp_avg/weight": torch.ones(300_000)}, {"step": 2}))
    except CheckpointError as error:
        print(error)
    else:
        sys.exit("the save should have failed")
    assert store.load().step == 1
"""


def test_a_save_that_fails_half_way_keeps_the_previous_checkpoint(tmp_path: Path) -> None:
    """A limit on the file size makes the write fail, as a full disk would."""
    child = subprocess.run(
        [sys.executable, "-c", DISK_FULL, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.count("could not save the checkpoint of step 2") == 2 and "intact" in child.stdout
    store = CheckpointStore(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-000001"]
    assert store.load().step == 1


def test_files_are_synced_to_disk_before_the_checkpoint_is_renamed_into_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killing a process does not reveal a missing fsync, but a power cut does. So the order of the calls is checked."""
    calls: list[tuple[str, str]] = []

    def record(kind: str, real: Callable[..., None]) -> None:
        def wrapped(*args: object) -> None:
            target = os.readlink(f"/proc/self/fd/{args[0]}") if kind == "fsync" else str(args[1])
            calls.append((kind, Path(target).name))
            real(*args)

        monkeypatch.setattr(os, kind, wrapped)

    for kind in ("fsync", "rename", "replace"):
        record(kind, getattr(os, kind))
    CheckpointStore(tmp_path / "checkpoints").save(7, small_state())
    named = calls.index(("rename", "step-000007"))
    written = {name.partition("-step")[0] for kind, name in calls[:named] if kind == "fsync"}
    assert written == {"model.safetensors", "optimizer.safetensors", "state.json", "manifest.json", ".tmp"}
    marked = calls.index(("replace", "latest"))
    assert calls.index(("fsync", "checkpoints"), named) < marked
    assert calls[marked - 1][0] == "fsync" and calls[marked + 1 :] == [("fsync", "checkpoints")]


def test_a_checkpoint_has_only_json_and_safetensors_files(tmp_path: Path) -> None:
    path = CheckpointStore(tmp_path).save(1, trained(Policy(qwen3(), settings()), 0, 1).state())
    assert sorted(file.name for file in path.iterdir()) == [
        "manifest.json",
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
    ]
    json.loads((path / "state.json").read_text())


def test_detached_state_does_not_follow_later_steps() -> None:
    policy = trained(Policy(qwen3(), settings()), 0, 1)
    kept = policy.state().detached()
    before = {name: tensor.clone() for name, tensor in {**kept.model, **kept.optimizer}.items()}
    trained(policy, 1, 2)
    for name, tensor in before.items():
        assert torch.equal(tensor, {**kept.model, **kept.optimizer}[name])
    assert kept.progress["step"] == 1
