"""Workers on another node write their rows themselves: bytes through the trainer, kills, suspended workers,
lost nodes."""

import json
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray_runs import QUEUE, STORE, lines, metrics_without_clock, node_of, ranks_recipe
from small_runs import start_cli, write_toml

import understudy
from understudy.dataplane.ledger import audit

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]
TOPK, NEW, ROWS, STEPS = 40, 12, 16, 2


def cluster_with_remote_workers(cluster: Any, **changes: Any) -> dict[str, Any]:
    """Settings for two ranks, the first beside the trainer, and two rollout workers on a node of their own."""
    pools = {"train": {"nodes": 2, "cpus_per_node": 1}, "loops": {"nodes": 1, "cpus_per_node": 2}}
    roles = {"student": "train", "workers": "loops"}
    return {
        "cluster": {"backend": "ray", "address": cluster.address, "pools": pools, "roles": roles},
        "dataplane": QUEUE,
        **changes,
    }


@pytest.mark.parametrize("cluster", [2], indirect=True, ids=["head-has-cpus"])
def test_remote_workers_write_and_score_rows_without_passing_columns_through_the_trainer(
    cluster: Any, tmp_path: Path
) -> None:
    for _ in range(2):
        cluster.add_node(num_cpus=3, object_store_memory=STORE)
    wide: dict[str, Any] = {
        "loss": {"topk": TOPK},
        "rollout": {"max_new_tokens": NEW, "workers": 2},
        "trainer": {"batch_size": ROWS},
    }
    here = understudy.train(ranks_recipe(tmp_path / "here", STEPS, **wide), progress=False)
    there = understudy.train(
        ranks_recipe(tmp_path / "there", STEPS, **wide, **cluster_with_remote_workers(cluster)),
        progress=False,
    )
    assert metrics_without_clock(there.dir) == metrics_without_clock(here.dir), (
        "teacher requests should be composed as in a local run"
    )
    report = audit(there.dir / "dataplane")
    assert report.balanced and (report.trained, report.dead) == (ROWS * STEPS, 0)

    last, rows = lines(there.dir)[-1], ROWS * STEPS
    sizes = worker_traffic(there.dir)
    print({name: count / rows for name, count in sizes.items()})
    assert last["perf/workers/rows_judged_here"] == 0 and last["perf/queue/bytes_put"] == 0
    assert last["perf/queue/bytes_got"] == 0, "ranks should fetch rows, the trainer should not"
    assert sizes["besides"] / rows < 1500, "only prompt, sizes, reward and where the columns are"
    assert last["perf/ranks/bytes_sent"] < 150 * rows

    wide["loss"]["topk"] = 4
    narrow = understudy.train(
        ranks_recipe(tmp_path / "narrow", STEPS, **wide, **cluster_with_remote_workers(cluster)),
        progress=False,
    )
    written = sum(line["response_length/mean"] * line["rollout/rows"] for line in lines(there.dir))
    assert written * (TOPK - 4) * 8 > sizes["besides"], (
        "the additional scores are larger than all that passed"
    )
    assert abs(worker_traffic(narrow.dir)["besides"] - sizes["besides"]) < 0.05 * sizes["besides"], (
        "the additional scores should not pass through the trainer"
    )


def worker_traffic(run: Path) -> dict[str, float]:
    """Bytes between the trainer's process and workers in both directions; `besides` leaves out those of generations."""
    last = lines(run)[-1]
    sizes = {name: last[f"perf/workers/bytes_{name}"] for name in ("sent", "received", "of_generation")}
    return {**sizes, "besides": sizes["sent"] + sizes["received"] - sizes["of_generation"]}


@pytest.mark.parametrize("fault", ["row_worker.written:6", "row_worker.scored:2"])
@pytest.mark.parametrize("cluster", [2], indirect=True, ids=["head-has-cpus"])
def test_workers_killed_after_writing_and_before_announcing_rows_lose_and_repeat_no_row(
    cluster: Any, tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every worker process is killed with SIGKILL when it has written columns (or scores) but not announced them."""
    monkeypatch.setenv("UNDERSTUDY_FAULT", fault)
    for _ in range(2):
        cluster.add_node(num_cpus=3, object_store_memory=STORE)
    monkeypatch.delenv("UNDERSTUDY_FAULT")
    steps, small = 3, {"max_new_tokens": 6, "workers": 2}
    table = ranks_recipe(tmp_path / "run", steps, **cluster_with_remote_workers(cluster, rollout=small))
    run = understudy.train(table, progress=False)
    log = (run.dir / "logs" / "trainer.log").read_text()
    what = "work request score" if "scored" in fault else "_0_0"
    assert f"{what} is begun again" in log, "a process was killed"
    report = audit(run.dir / "dataplane")
    assert report.balanced and (report.trained, report.dead) == (8 * steps, 0)
    whole = understudy.train(ranks_recipe(tmp_path / "whole", steps, rollout=small), progress=False)
    assert metrics_without_clock(run.dir) == metrics_without_clock(whole.dir), (
        "the kill should not change the metrics"
    )


@pytest.mark.parametrize("cluster", [2], indirect=True, ids=["head-has-cpus"])
def test_a_suspended_worker_that_continues_after_its_replacement_changes_nothing(
    cluster: Any, tmp_path: Path
) -> None:
    """The worker gets SIGSTOP during its rows, its supervisor is killed, other workers make its rows again;
    then SIGCONT."""
    for _ in range(2):
        cluster.add_node(num_cpus=3, object_store_memory=STORE)
    steps, small = 15, {"max_new_tokens": 6, "workers": 2}
    table = ranks_recipe(tmp_path / "run", steps, **cluster_with_remote_workers(cluster, rollout=small))
    process = start_cli("train", str(write_toml(tmp_path / "recipe.toml", table)), "--quiet")
    metrics, log = tmp_path / "run" / "metrics.jsonl", tmp_path / "run" / "logs" / "trainer.log"

    def steps_done() -> int:
        assert process.poll() is None and time.monotonic() < deadline, "the run did not take enough steps"
        time.sleep(0.02)
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    deadline = time.monotonic() + 400
    while steps_done() < 3:
        pass
    pid = int(re.findall(r"process rollout-worker-0 runs on \S+ \(pid (\d+)\)", log.read_text())[-1])
    stopped = psutil.Process(pid)
    supervisor = stopped.parent()
    assert supervisor is not None and "ray::" in " ".join(supervisor.cmdline())
    stopped.suspend()
    supervisor.kill()
    while "is begun again" not in log.read_text():
        steps_done()
    # Ray ends the processes of a killed supervisor sooner or later. Then the worker cannot continue.
    with suppress(psutil.NoSuchProcess):
        assert stopped.status() == psutil.STATUS_STOPPED, "the worker should still be suspended"
        stopped.resume()
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output[-3000:]
    stopped.wait(30)
    report = audit(tmp_path / "run" / "dataplane")
    assert report.balanced and (report.trained, report.dead) == (8 * steps, 0)
    whole = understudy.train(ranks_recipe(tmp_path / "whole", steps, rollout=small), progress=False)
    assert metrics_without_clock(tmp_path / "run") == metrics_without_clock(whole.dir)


@pytest.mark.parametrize("cluster", [2], indirect=True, ids=["head-has-cpus"])
def test_a_resume_after_a_trainer_kill_trains_the_rows_that_remote_workers_announced_once(
    cluster: Any, tmp_path: Path
) -> None:
    """With groups, rewards computed by workers, and rows in order of arrival. Announced rows are in the run
    directory."""
    for _ in range(2):
        cluster.add_node(num_cpus=3, object_store_memory=STORE)
    steps, rows = 24, 16
    table = ranks_recipe(
        tmp_path / "run",
        steps,
        **cluster_with_remote_workers(cluster, rollout={"max_new_tokens": 6, "workers": 2, "n": 2}),
        trainer={"mode": "fully_async", "max_staleness": 1, "checkpoint_every": 3},
        run={"determinism": "fast"},
    )
    table["data"]["reward"] = "understudy.rollout.rewards.builtin:exact_match"
    process = start_cli("train", str(write_toml(tmp_path / "recipe.toml", table)), "--quiet")
    metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 300
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 5:
        assert process.poll() is None and time.monotonic() < deadline, "the run did not take enough steps"
        time.sleep(0.02)
    process.kill()
    process.communicate(timeout=60)
    assert any((tmp_path / "run" / "dataplane" / "spill").glob("*.seg"))
    again = start_cli("resume", str(tmp_path / "run"), "--quiet")
    output, _ = again.communicate(timeout=400)
    assert again.returncode == 0, output[-3000:]
    run = tmp_path / "run"
    assert len(lines(run)) == steps
    report = audit(run / "dataplane")
    assert report.balanced and (report.trained, report.dead) == (rows * steps, 0)
    last = lines(run)[-1]
    assert last["perf/workers/rows_judged_here"] == 0
    assert "critic/score/mean" in last and last["perf/workers/bytes_received"] > 0
    left = [path for path in (run / "dataplane" / "spill").glob("*.seg") if path.stat().st_size]
    assert len(left) <= 12, "segments of trained rows should be removed"


@pytest.mark.parametrize("cluster", [2], indirect=True, ids=["head-has-cpus"])
def test_a_run_continues_when_the_node_of_its_workers_is_lost(cluster: Any, tmp_path: Path) -> None:
    """Other processes on that node (a teacher, a part of the queue) are lost too; the workers restart on
    another node."""
    for _ in range(3):
        cluster.add_node(num_cpus=3, object_store_memory=STORE)
    steps, small = 30, {"max_new_tokens": 6, "workers": 2}
    pools = {"loops": {"nodes": 1, "cpus_per_node": 2}}
    table = ranks_recipe(
        tmp_path / "run",
        steps,
        rollout=small,
        trainer={"ranks": 1},
        cluster={
            "backend": "ray", "address": cluster.address, "pools": pools, "roles": {"workers": "loops"}
        },
        dataplane={**QUEUE, "queue_timeout_seconds": 10.0},
    )  # fmt: skip
    process = start_cli("train", str(write_toml(tmp_path / "recipe.toml", table)), "--quiet")
    metrics, log = tmp_path / "run" / "metrics.jsonl", tmp_path / "run" / "logs" / "trainer.log"
    deadline = time.monotonic() + 300
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 4:
        assert process.poll() is None and time.monotonic() < deadline, "the run did not take enough steps"
        time.sleep(0.02)
    pid = int(re.findall(r"process rollout-worker-0 runs on \S+ \(pid (\d+)\)", log.read_text())[-1])
    cluster.remove_node(node_of(cluster, pid), allow_graceful=False)
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output[-3000:]
    assert log.read_text().count("process rollout-worker-0 runs on") > 1, (
        "the worker should restart on another node"
    )
    report = audit(tmp_path / "run" / "dataplane")
    assert report.balanced and (report.trained, report.dead) == (8 * steps, 0)
    whole = ranks_recipe(tmp_path / "whole", steps, rollout=small, trainer={"ranks": 1})
    assert metrics_without_clock(tmp_path / "run") == metrics_without_clock(
        understudy.train(whole, progress=False).dir
    )


@pytest.mark.parametrize("cluster", [2], indirect=True, ids=["head-has-cpus"])
def test_bad_outputs_of_remote_sessions_make_the_same_dead_letters_as_local_ones(
    cluster: Any, tmp_path: Path
) -> None:
    """Reward or scoring fails for some outputs. Dead letters and metrics are those of loops in the trainer's
    process."""
    for _ in range(2):
        cluster.add_node(num_cpus=3, object_store_memory=STORE)
    loop = "many_outputs:Outputs"
    trouble = {
        "1/1": "long",
        "2/0": "strange",
        "3/1": "raise",
        "4/0": "nan",
        "5/1": "hang",
        "6/0": "raise",
        "6/1": "long",
        "7/0": "odd",
    }
    bad: dict[str, Any] = {
        "rollout": {
            "max_new_tokens": 6, "workers": 2, "deadline_seconds": 4.0,
            "agent": loop, "agent_options": {loop: {"trouble": trouble}},
        },
        "data": {"reward": "many_outputs:reward", "shuffle": False},
    }  # fmt: skip

    def outcome(name: str, **more: Any) -> tuple[Any, dict[str, str]]:
        table = ranks_recipe(tmp_path / name, 2, **bad, **more)
        table["trainer"]["max_dead_letters"] = 0.5
        run = understudy.train(table, progress=False)
        report = audit(run.dir / "dataplane")
        assert report.balanced and (report.trained, report.dead, report.in_flight) == (32 - 8, 8, 0)
        letters = (run.dir / "dataplane" / "dead_letters.jsonl").read_text().splitlines()
        return metrics_without_clock(run.dir), {one["key"]: one["reason"] for one in map(json.loads, letters)}

    here_figures, here_letters = outcome("here")
    there_figures, there_letters = outcome("there", **cluster_with_remote_workers(cluster))
    assert there_figures == here_figures
    assert there_letters.keys() == here_letters.keys()
    for key, reason in here_letters.items():
        there_reason = there_letters[key]
        assert there_reason == reason or ("row '" in reason and key in there_reason), (reason, there_reason)
