"""`critic.process`: PPO with the critic in a process of its own gives the same bits; kills, resumes, refused rows."""

import asyncio
import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file, save_file
from small_runs import ASSETS, Command, living_children, start_cli, write_toml

import understudy
from understudy.dataplane.ledger import audit
from understudy.errors import LossInputError, PolicyError
from understudy.observability.metrics import read_metrics, without_clock
from understudy.run.launch import resume
from understudy.run.replay import replay_run

Make = Callable[..., dict[str, Any]]
PPO = {"task_coef": 1.0, "distill_coef": 0.0, "advantage": "gae", "lam": 0.95}
STEPS = 3


@pytest.fixture(autouse=True)
def _rewards_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))


def ppo(folder: Path, name: str, critic: dict[str, Any] | None = None, **trainer: Any) -> dict[str, Any]:
    """A PPO recipe with two prompts of three sessions per update and two updates per step."""
    rows = folder / "rows.jsonl"
    rows.write_text("".join((ASSETS / "data" / "train.jsonl").read_text().splitlines(keepends=True)[:100]))
    return {
        "student": {"model": str(ASSETS / "models" / "student"), "device": "cpu"},
        "loss": PPO,
        "critic": {"learning_rate": 1e-3, "only_steps": 1, **(critic or {})},
        "rollout": {"n": 3, "max_new_tokens": 6, "max_batch": 8},
        "data": {"train": str(rows), "reward": "small_rewards:varied"},
        "trainer": {
            "steps": STEPS,
            "batch_size": 4,
            "mini_batch_size": 2,
            "learning_rate": 1e-3,
            "checkpoint_every": 1,
            **trainer,
        },
        "cluster": {},
        "run": {"dir": str(folder / name), "threads": 1},
    }


def metric_lines(run: Path) -> list[dict[str, Any]]:
    """The metrics of each step without clocks and without `perf/`, which counts the bytes sent to the critic."""
    found = [without_clock(line) for line in read_metrics(run / "metrics.jsonl")]
    return [{name: value for name, value in line.items() if not name.startswith("perf/")} for line in found]


def assert_same(one: Path, other: Path, step: int = STEPS) -> None:
    """Compares every metric of every step and every tensor of the last checkpoint: student, critic, both optimizers."""
    assert metric_lines(one) == metric_lines(other) and len(metric_lines(one)) == step
    for name in ("model", "optimizer"):
        mine, theirs = (
            load_file(run / "checkpoints" / f"step-{step:06d}" / f"{name}.safetensors")
            for run in (one, other)
        )
        assert mine.keys() == theirs.keys()
        assert all(mine[key].tobytes() == theirs[key].tobytes() for key in mine), name
    assert {"critic.model", "critic.optimizer"} <= {key.split("/")[0] for key in mine}


@pytest.fixture(scope="module")
def module_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("undisturbed")


def run_without_process(module_folder: Path) -> Path:
    """The reference run, trained once, with the critic in the trainer's process."""
    if not (module_folder / "run" / "report.html").exists():
        understudy.train(ppo(module_folder, "run"), progress=False)
    return module_folder / "run"


def critic_processes() -> list[int]:
    return [
        child.pid for child in living_children() if "understudy.assembly.processes.critic" in child.cmdline()
    ]


def test_a_critic_process_gives_the_same_bits_as_a_critic_in_the_trainer(
    tmp_path: Path, module_folder: Path
) -> None:
    run = understudy.train(ppo(tmp_path, "run", {"process": True}), progress=False)
    assert_same(run.dir, run_without_process(module_folder))
    assert run.last["perf/critic/bytes_sent"] > 0 and run.last["perf/critic/bytes_received"] > 0
    assert "the critic answers at http://127.0.0.1:" in (run.dir / "logs" / "critic.log").read_text()
    assert not critic_processes(), "the critic's process outlived its run"


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False], ids=["out to in", "in to out"])
def test_a_resume_may_move_the_critic_into_or_out_of_its_own_process(
    tmp_path: Path, module_folder: Path, first: bool
) -> None:
    """One step in one place and two in the other give the bits of a run without the move."""
    run = understudy.train(ppo(tmp_path, "run", {"process": first}, steps=1), progress=False).dir
    assert (run / "logs" / "critic.log").exists() == first
    moved = [f"trainer.steps={STEPS}", f"critic.process={'false' if first else 'true'}"]
    asyncio.run(resume(run, moved, progress=False))
    assert_same(run, run_without_process(module_folder))
    assert (run / "logs" / "critic.log").exists()


@pytest.mark.slow
def test_a_critic_process_gives_the_same_bits_when_async_with_two_threads(tmp_path: Path) -> None:
    runs = []
    for process in (False, True):
        table = ppo(tmp_path, f"run-{process}", {"process": process}, mode="fully_async", max_staleness=0)
        table["run"] |= {"threads": 2, "determinism": "full"}
        runs.append(understudy.train(table, progress=False).dir)
    assert_same(*runs)


@pytest.mark.slow
def test_rows_that_break_the_critic_s_update_are_named_and_stored_for_replay(tmp_path: Path) -> None:
    outcomes = []
    for process in (False, True):
        # The first update of the step makes the weights so large that the second one's loss is inf or nan.
        table = ppo(tmp_path, f"run-{process}", {"process": process, "learning_rate": 1e30})
        with pytest.raises(
            PolicyError, match=r"step 0 stopped with loss (inf|nan); .*row\(s\): 00000-.* were not touched"
        ) as raised:
            understudy.train(table, progress=False)
        run = Path(table["run"]["dir"])
        rows = [json.loads(line) for line in (run / "refused.jsonl").read_text().splitlines()]
        outcomes.append((str(raised.value), rows, (run / rows[0]["file"]).read_bytes()))
        assert rows and {row["role"] for row in rows} == {"critic"}
        assert not list((run / "checkpoints").glob("step-*")), "the refused step left a checkpoint"
        found = replay_run(run)
        assert found.role == "critic" and [finding.key for finding in found.findings] == [
            row["key"] for row in rows
        ]
    assert outcomes[0] == outcomes[1], "message, rows and columns should not depend on where the critic is"


@pytest.mark.slow
def test_nan_advantages_are_refused_by_a_critic_process(tmp_path: Path) -> None:
    """The rewards are so large that the advantages are nan. The critic refuses them as it would in the trainer."""
    table = ppo(tmp_path, "run", {"process": True})
    table["data"]["reward"] = "small_rewards:immense"
    with pytest.raises(LossInputError, match="advantages_N holds nan"):
        understudy.train(table, progress=False)
    assert not critic_processes()


@pytest.mark.slow
def test_a_run_whose_critic_is_killed_goes_back_to_its_last_checkpoint(
    tmp_path: Path, module_folder: Path
) -> None:
    """The critic dies at its twelfth command, the first update of step 3; its replacement lives to the end."""
    table = ppo(tmp_path, "run", {"process": True})
    process = start_cli(
        "train", str(write_toml(tmp_path / "r.toml", table)), "--quiet", fault="critic.after_command:12"
    )
    output, _ = process.communicate(timeout=150)
    assert process.returncode == 0, output
    log_text = (tmp_path / "run" / "logs" / "trainer.log").read_text()
    assert (
        "the critic was killed by SIGKILL (out of memory, or by a user or another process); log: " in log_text
    )
    assert "going back to step 2 (restart 1 of 1)" in log_text
    assert_same(tmp_path / "run", run_without_process(module_folder))
    report = audit(tmp_path / "run")
    assert report.balanced and report.trained == STEPS * 12, "every row once"


Started = tuple[Command, Path, psutil.Process]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    """A long run after its first step, its directory and its critic's process. Losing the critic ends the run."""
    table = ppo(tmp_path, "run", {"process": True}, steps=5000, checkpoint_every=1000)
    table["cluster"] = {"restarts": {"student": 0}}
    process = start_cli("train", str(write_toml(tmp_path / "r.toml", table)), "--quiet")
    try:
        deadline = time.monotonic() + 150
        while not read_metrics(tmp_path / "run" / "metrics.jsonl"):
            assert process.poll() is None and time.monotonic() < deadline, "no step was taken"
            time.sleep(0.1)
        (critic,) = psutil.Process(process.pid).children(recursive=True)
        yield process, tmp_path / "run", critic
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_killed_critic_without_restarts_ends_the_run_with_an_error_that_names_it(started: Started) -> None:
    process, run, critic = started
    critic.kill()
    killed = time.monotonic()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2 and "Traceback" not in output, output
    assert (
        f"the critic was killed by SIGKILL (out of memory, or by a user or another process); log: {run}"
        in output
    )
    assert "`understudy resume` continues" in output
    assert time.monotonic() - killed < 15


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_the_critic_process_ends_when_the_trainer_is_killed_or_stopped(
    started: Started, how: signal.Signals
) -> None:
    process, run, critic = started
    process.send_signal(how)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == (-how if how is signal.SIGKILL else 130), output
    psutil.wait_procs([critic], timeout=20)
    assert not critic.is_running() or critic.status() == psutil.STATUS_ZOMBIE
    assert audit(run).balanced


@pytest.mark.slow
def test_a_critic_that_cannot_load_its_model_ends_the_run_and_names_its_log(tmp_path: Path) -> None:
    table = ppo(tmp_path, "run", {"process": True})
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in (ASSETS / "models" / "student").iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    save_file(
        {"other": np.zeros(1, np.float32)}, broken / "model.safetensors"
    )  # a valid file without the model's tensors
    table["critic"]["model"] = str(broken)
    with pytest.raises(Exception, match=r"process critic ended with code \d; log: .*critic\.log"):
        understudy.train(table, progress=False)
    assert not critic_processes()
