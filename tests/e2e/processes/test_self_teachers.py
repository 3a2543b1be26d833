"""The student as its own teacher, in whole runs: which weights score which row, schedules, lost replicas, kills."""

import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small_runs import ASSETS, run_cli, until_back, write_toml
from transformers import AutoModelForCausalLM

import understudy
from understudy.assembly.teachers.following import FollowingReplicas
from understudy.assembly.teachers.launchers import LocalTeachers
from understudy.cluster.local import Child, LocalProcesses
from understudy.dataplane.kept_rows import read_columns
from understudy.dataplane.ledger import audit
from understudy.errors import ConfigError, UnderstudyError
from understudy.observability.metrics import without_clock
from understudy.policy.checkpoints.checkpoint import CheckpointStore
from understudy.serving.endpoint import Endpoint

Make = Callable[..., dict[str, Any]]
ROWS = [json.loads(line) for line in (ASSETS / "data" / "train.jsonl").read_text().splitlines()][:64]
STUDENT = ASSETS / "models" / "student"
VOCABULARY = json.loads((STUDENT / "config.json").read_text())["vocab_size"]
DECAY = 0.5
Weights = Mapping[str, torch.Tensor]


@pytest.fixture
def make_recipe(train_rows: Path, tmp_path: Path) -> Make:
    """Makes recipes whose teachers are the student itself: version `add` scores sums, version `sort` scores sorting."""

    def make(name: str, add: Any, sort: Any, **more: Any) -> dict[str, Any]:
        teachers = {
            key: {"model": "student", "version": version, "key": key, "prompt": "{{ answer }}{{ prompt }}"}
            for key, version in (("add", add), ("sort", sort))
        }
        table: dict[str, Any] = {
            "student": {"model": str(STUDENT)},
            "teachers": teachers,
            "loss": {"topk": VOCABULARY},
            "rollout": {"max_new_tokens": 8, "max_batch": 8},
            "data": {"train": str(train_rows)},
            "trainer": {
                "steps": 4,
                "batch_size": 8,
                "learning_rate": 1e-3,
                "checkpoint_every": 1,
                "keep_checkpoints": 9,
            },
            "run": {"dir": str(tmp_path / name), "threads": 1, "keep_rows": 1 << 22},
        }
        if "ema" in (add, sort):
            table["trainer"]["ema_decay"] = DECAY
        for path, value in more.items():
            section, key = path.split("__")
            table[section][key] = value
        return table

    return make


def published_weights(run: Path, version: int) -> Weights:
    return load_file(run / "checkpoints" / f"step-{version:06d}" / "model.safetensors") if version else {}


def averaged_weights(run: Path, version: int) -> Weights:
    """The running average of the weights, computed from the checkpoints of every step."""
    start = dict(AutoModelForCausalLM.from_pretrained(STUDENT, dtype=torch.float32).named_parameters())
    average = {name: tensor.detach().double() for name, tensor in start.items()}
    for step in range(1, version + 1):
        weights = published_weights(run, step)
        average = {name: DECAY * old + (1 - DECAY) * weights[name].double() for name, old in average.items()}
    return average


def logprobs(weights: Weights, tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """float64 [P, V] of a plain forward pass of the student with these weights ({}: its original ones)."""
    model = AutoModelForCausalLM.from_pretrained(STUDENT, dtype=torch.float64).eval()
    model.load_state_dict(dict(weights), strict=False)
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0]
    return torch.log_softmax(logits, -1).numpy()[positions - 1]


def kept_rows_of(run: Path, step: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    lines = [json.loads(line) for line in (run / "kept_rows" / f"{step:06d}.jsonl").open(encoding="utf-8")]
    return [(line, read_columns(run / "kept_rows", step, line)) for line in lines]


def largest_difference(weights: Weights, teacher: str, columns: dict[str, Any]) -> float:
    """The largest difference in probability between a row's stored scores and a plain forward with these weights."""
    prompt, first = columns[f"teacher_prompt_{teacher}"], int(columns["loss_mask"].argmax())
    written = columns["tokens"][first:]
    p_PV = logprobs(weights, np.concatenate([prompt, written]), len(prompt) + np.arange(len(written)))
    ids, found = columns["teacher_ids"].astype(int), columns["teacher_topk_logprobs"]
    return float(np.abs(np.exp(np.take_along_axis(p_PV, ids, 1)) - np.exp(found)).max())


def bits(run: Path, step: int = 4) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    weights = load_file(run / "checkpoints" / f"step-{step:06d}" / "model.safetensors")
    lines = [without_clock(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [{name: value for name, value in line.items() if not name.startswith("async/")} for line in lines]
    return lines, {name: value.numpy().tobytes() for name, value in weights.items()}


@pytest.mark.slow
def test_each_teacher_version_scores_with_the_weights_of_that_version(make_recipe: Make) -> None:
    """Compares whole distributions with a plain forward pass with that version's weights, in several steps."""
    first = understudy.train(make_recipe("first", "live", 2), progress=False).dir
    second = understudy.train(make_recipe("second", "ema", "start"), progress=False).dir
    expected: dict[str, Callable[[Path, int], tuple[int, Weights]]] = {
        "live": lambda run, before: (before, published_weights(run, before)),
        "2": lambda run, before: (max(0, before - 2), published_weights(run, max(0, before - 2))),
        "ema": lambda run, before: (before, averaged_weights(run, before)),
        "start": lambda run, before: (-1, {}),
    }
    for run, kinds in ((first, {"add": "live", "sort": "2"}), (second, {"add": "ema", "sort": "start"})):
        for step in (1, 2, 4):
            rows = kept_rows_of(run, step)
            for teacher, kind in kinds.items():
                version, weights = expected[kind](run, step - 1)
                mine = [columns for summary, columns in rows if summary["teacher"] == teacher]
                assert mine and {int(columns["teacher_version"]) for columns in mine} == {version}
                assert largest_difference(weights, teacher, mine[0]) < 1e-5
                if step == 4:
                    assert largest_difference(published_weights(run, 4), teacher, mine[0]) > 1e-4, (
                        "scores of another version should differ"
                    )


@pytest.mark.slow
def test_two_replicas_and_the_async_schedule_give_the_same_bits(make_recipe: Make) -> None:
    one = understudy.train(make_recipe("one", "live", 1), progress=False).dir
    table = make_recipe("other", "live", 1, trainer__mode="fully_async", trainer__max_staleness=0.0)
    table["teachers"]["add"]["replicas"] = 2
    assert bits(understudy.train(table, progress=False).dir) == bits(one)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_replica_killed_at_a_publish_restarts_with_the_new_version(
    make_recipe: Make, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The only replica of a teacher is killed just before it gets the weights of version 2, or just after."""
    launchers: dict[str, LocalTeachers] = {}
    start, send = LocalTeachers.start, FollowingReplicas.send

    async def noted(self: LocalTeachers, replica: str) -> Endpoint:
        launchers[self._name] = self
        return await start(self, replica)

    def kill() -> None:
        child = launchers["add"]._processes.children["teacher-add-0"]
        os.kill(child.process.pid, signal.SIGKILL)
        while child.alive:
            time.sleep(0.01)

    async def sent(self: FollowingReplicas, version: int, *rest: Any) -> dict[str, str]:
        mine = self is launchers["add"].following and version == 2
        if mine and moment == "before":
            kill()
        lost = await send(self, version, *rest)
        if mine and moment == "after":
            kill()
        return lost

    straight = understudy.train(make_recipe("straight", "live", 1), progress=False).dir
    monkeypatch.setattr(LocalTeachers, "start", noted)
    monkeypatch.setattr(FollowingReplicas, "send", sent)
    run = understudy.train(make_recipe("killed", "live", 1), progress=False).dir
    assert "back after a restart" in (run / "logs" / "trainer.log").read_text()
    assert bits(run) == bits(straight)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "hangs_at"), [("sync", 0), ("fully_async", 2)])
def test_a_publish_completes_without_a_replica_that_hangs(
    make_recipe: Make, monkeypatch: pytest.MonkeyPatch, mode: str, hangs_at: int
) -> None:
    """One of two replicas, treated as if it were on another machine, is stopped before it joins the broadcast group or
    once it is a member. A publish used to wait for 120 s."""
    publishes: list[tuple[Sequence[str], dict[str, str]]] = []
    pids: dict[str, int] = {}
    start, send = LocalProcesses.start, FollowingReplicas.send

    async def noted(self: LocalProcesses, name: str, *rest: Any) -> Child:
        child = await start(self, name, *rest)
        pids[name] = child.process.pid
        return child

    async def sent(self: FollowingReplicas, version: int, tensors: Any, replicas: Sequence[str]) -> Any:
        if self._teacher == "add" and version == hangs_at:
            os.kill(pids["teacher-add-1"], signal.SIGSTOP)
        began = time.monotonic()
        lost = await send(self, version, tensors, replicas)
        assert time.monotonic() - began < 90
        if self._teacher == "add":
            publishes.append((replicas, lost))
        return lost

    more: dict[str, Any] = {"trainer__mode": mode, "trainer__steps": 4 if mode == "sync" else 12}
    if mode == "fully_async":
        more |= {"trainer__max_staleness": 1.0}
    monkeypatch.setattr(LocalProcesses, "start", noted)
    monkeypatch.setattr(LocalProcesses, "shares_memory", lambda *_: False)
    monkeypatch.setattr(FollowingReplicas, "send", sent)
    table = make_recipe("hung", "live", "live", **more)
    table["teachers"]["add"]["replicas"] = 2
    before_last = table["trainer"]["steps"] - 1
    run = understudy.train(table, progress=False, on_step=until_back(before_last)).dir
    assert [list(lost) for _, lost in publishes[: hangs_at + 1]] == [[]] * hangs_at + [["1"]]
    assert "does not answer /health" in publishes[hangs_at][1]["1"]
    assert publishes[-1] == (["0", "1"], {})
    report = audit(run / "dataplane")
    assert report.balanced and report.dead == 0
    if mode == "sync":
        monkeypatch.undo()
        assert bits(run) == bits(
            understudy.train(make_recipe("straight", "live", "live"), progress=False).dir
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "fault"),
    [("ema", "sync.after_metrics:3"), ("ema", "sync.after_update:3"), ("live", "sync.after_update:3")],
)
def test_a_killed_run_with_a_lagging_teacher_resumes_to_the_same_bits(
    make_recipe: Make, tmp_path: Path, version: str, fault: str
) -> None:
    """The checkpoint is of step 2 and the teacher lags by 1: the resume needs weights that only
    `teacher_weights` has."""
    more: dict[str, Any] = {"trainer__checkpoint_every": 2, "trainer__keep_checkpoints": 2}
    table = make_recipe("resumed", version, 1, **more)
    code, output = run_cli("train", str(write_toml(tmp_path / "r.toml", table)), "--quiet", fault=fault)
    assert code == -signal.SIGKILL, output
    code, output = run_cli("resume", table["run"]["dir"], "--quiet")
    assert code == 0, output
    straight = understudy.train(make_recipe("straight", version, 1, **more), progress=False).dir
    run = Path(table["run"]["dir"])
    assert bits(run) == bits(straight)
    rows, others = ([line["teacher_version"] for line, _ in kept_rows_of(one, 4)] for one in (run, straight))
    assert rows == others and set(rows) == {2, 3}
    assert sorted(one.name for one in (run / "teacher_weights").iterdir()) == [
        f"v{version}.safetensors" for version in (1, 2, 3, 4)
    ], "older ones are removed"


def test_each_async_row_is_scored_by_one_version_within_the_staleness_bound(make_recipe: Make) -> None:
    """With staleness 1 and partial rollouts, versions depend on timing. All scores of a row must come from the
    one version that it names, and that version must not be older than the bound."""
    table = make_recipe(
        "run", "live", 1, trainer__mode="fully_async", trainer__max_staleness=1.0, trainer__steps=6
    )
    run = understudy.train(table, progress=False).dir
    seen = set()
    for step in (2, 4, 6):
        for summary, columns in kept_rows_of(run, step):
            version, teacher = int(columns["teacher_version"]), summary["teacher"]
            age = step - 1 - version
            assert 0 <= age - (teacher == "sort") <= 1 or version == 0
            assert largest_difference(published_weights(run, version), teacher, columns) < 1e-5
            seen.add(age)
    assert seen >= {0, 1} or seen >= {1, 2}


def test_teacher_weights_that_an_unfinished_checkpoint_needs_are_kept(
    make_recipe: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer publishes while the checkpoint is written. It used to remove weights that no finished
    checkpoint needed, so that the run could not be resumed."""
    table = make_recipe("run", 1, 1, trainer__steps=5, trainer__checkpoint_every=2, trainer__async_save=True)
    folder = Path(table["run"]["dir"]) / "teacher_weights"
    save, needed = CheckpointStore.save, dict[int, bool]()

    def slowly(store: CheckpointStore, step: int, *rest: Any) -> Path:
        deadline = time.monotonic() + 20
        while step < 5 and not (folder / f"v{step + 1}.safetensors").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.1)  # the trainer removes unneeded weights right after that file appears
        found = save(store, step, *rest)
        needed[step] = (folder / f"v{step - 1}.safetensors").exists()
        return found

    monkeypatch.setattr(CheckpointStore, "save", slowly)
    understudy.train(table, progress=False)
    assert needed[2] and needed[4], needed


@pytest.mark.slow
def test_resume_is_refused_when_weights_of_a_lagging_teacher_are_damaged_or_missing(
    make_recipe: Make,
) -> None:
    table = make_recipe("run", 1, 2, trainer__steps=3)
    run = understudy.train(table, progress=False).dir
    earlier = run / "teacher_weights" / "v1.safetensors"
    earlier.write_bytes(earlier.read_bytes()[:-100])
    with pytest.raises(UnderstudyError, match=r"v1.safetensors is damaged .*: a teacher of this run lags"):
        understudy.resume(run, progress=False, trainer__steps=4)
    earlier.unlink()
    with pytest.raises(UnderstudyError, match=r"v1.safetensors is missing: a teacher of this run lags"):
        understudy.resume(run, progress=False, trainer__steps=4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": "live"}, "without `prompt`"),
        ({"version": "ema", "prompt": "{{ prompt }}"}, "set trainer.ema_decay"),
        ({"version": 0}, "a whole number of at least 1"),
        ({"version": 1, "tensor_parallel": 2}, "cannot take new weights"),
        ({"model": "another/model", "version": "start"}, "belongs to model = 'student'"),
        ({"placement": "external", "urls": ["http://127.0.0.1:1"]}, "started by the run"),
    ],
)
def test_contradictory_self_teacher_settings_are_refused(
    make_recipe: Make, change: dict[str, Any], message: str
) -> None:
    table = make_recipe("never", "start", "start")
    table["teachers"] = {"me": {"model": "student", **change}}
    with pytest.raises(ConfigError, match=message):
        understudy.train(table, progress=False)
