"""Workers and engine processes on other nodes: generations pass through the trainer; kills and publishes lose
no row."""

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from ray_runs import QUEUE, STORE, lines, metrics_without_clock, ranks_recipe
from small_runs import start_cli, write_toml

import understudy
from understudy.dataplane.ledger import audit

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]
ROWS, STEPS = 8, 2
AGENT = {"agent": "two_turns:TwoTurns", "max_new_tokens": 6}
HEAD = pytest.mark.parametrize("cluster", [2], indirect=True, ids=["head-has-cpus"])


def remote_recipe(cluster: Any, folder: Path, steps: int, **changes: Any) -> dict[str, Any]:
    """A recipe with two ranks, the first beside the trainer, and two engines and two workers on nodes of their own."""
    pools = {name: {"nodes": 1, "cpus_per_node": 2} for name in ("write", "loops")}
    pools["train"] = {"nodes": 2, "cpus_per_node": 1}
    roles = {"student": "train", "rollout": "write", "workers": "loops"}
    rollout_section = {"rollout": {"processes": 2, "workers": 2} | changes.pop("rollout", {})}
    return ranks_recipe(
        folder,
        steps,
        **rollout_section,
        **changes,
        cluster={"backend": "ray", "address": cluster.address, "pools": pools, "roles": roles},
        dataplane=QUEUE,
    )


def add_nodes(cluster: Any) -> None:
    for _ in range(2):
        cluster.add_node(num_cpus=4, object_store_memory=STORE)


def bytes_through_the_trainer(run: Path) -> dict[str, float]:
    """Bytes in both directions over the whole run; of batches only those sent to other ranks, as rank 0 is the
    trainer."""
    last = lines(run)[-1]
    return {
        name: last.get(f"perf/{name}", 0.0)
        for name in (
            "workers/bytes_sent", "workers/bytes_received", "engines/bytes_sent", "engines/bytes_received",
            "queue/bytes_put", "queue/bytes_got", "ranks/bytes_sent",
        )
    }  # fmt: skip


def assert_every_row_trained(run: Path, rows: int) -> None:
    report = audit(run / "dataplane")
    assert report.balanced and (report.trained, report.dead) == (rows, 0)


@HEAD
def test_only_generations_and_not_columns_pass_through_the_trainer(cluster: Any, tmp_path: Path) -> None:
    add_nodes(cluster)
    rows = ROWS * STEPS
    generation: dict[int, float] = {}
    other_bytes: dict[int, float] = {}
    written: dict[int, float] = {}
    for new in (8, 64):
        hot = {"max_new_tokens": new, "temperature": 8.0}
        there = understudy.train(
            remote_recipe(cluster, tmp_path / f"{new}", STEPS, rollout=hot), progress=False
        ).dir
        assert_every_row_trained(there, rows)
        passed = bytes_through_the_trainer(there)
        generation[new] = lines(there)[-1]["perf/workers/bytes_of_generation"]
        engines = passed["engines/bytes_sent"] + passed["engines/bytes_received"]
        other_bytes[new] = sum(passed.values()) - generation[new] - engines
        written[new] = sum(line["response_length/mean"] * ROWS for line in lines(there))
        assert passed["queue/bytes_put"] == passed["queue/bytes_got"] == 0
    alone = {"rollout": {"max_new_tokens": 64, "temperature": 8.0}}
    here = understudy.train(ranks_recipe(tmp_path / "here", STEPS, **alone), progress=False).dir
    assert metrics_without_clock(tmp_path / "64") == metrics_without_clock(here), (
        "every bit should be the same"
    )

    print(generation, other_bytes, written)
    assert written[64] > 3 * written[8]
    a_token = (generation[64] - generation[8]) / (written[64] - written[8])
    assert a_token == pytest.approx(12, rel=0.05), "id, logprob, weight version"
    assert abs(other_bytes[64] - other_bytes[8]) < 16 * rows, (
        "columns and scores should not pass through the trainer"
    )


@HEAD
def test_an_agent_with_two_turns_in_remote_workers_gives_the_same_metrics(
    cluster: Any, tmp_path: Path
) -> None:
    """The engines are beside the trainer."""
    add_nodes(cluster)
    table = remote_recipe(cluster, tmp_path / "there", STEPS, rollout=AGENT)
    del table["cluster"]["roles"]["rollout"], table["cluster"]["pools"]["write"]
    there = understudy.train(table, progress=False).dir
    assert_every_row_trained(there, ROWS * STEPS)
    here = understudy.train(ranks_recipe(tmp_path / "here", STEPS, rollout=AGENT), progress=False).dir
    assert metrics_without_clock(there) == metrics_without_clock(here)
    assert lines(there)[-1]["num_turns/min"] == 2


@pytest.mark.parametrize(
    ("agent", "steps", "faults"), [("single_turn", 4, (9, 11)), ("two_turns:TwoTurns", 3, (17, 13))]
)
@HEAD
def test_workers_killed_during_a_generation_lose_no_row_and_change_no_metric(
    cluster: Any,
    tmp_path: Path,
    agent: str,
    steps: int,
    faults: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every worker process is killed with SIGKILL during a generation. Its sessions begin again and get the
    generations that they already had, so the engine's batches are those of a run without kills."""
    for point, passage in zip(("worker.asked", "worker.answered"), faults, strict=True):
        monkeypatch.setenv("UNDERSTUDY_FAULT", f"{point}:{passage}")
        cluster.add_node(num_cpus=4, object_store_memory=STORE)
    monkeypatch.delenv("UNDERSTUDY_FAULT")
    rollout = {**AGENT, "agent": agent}
    table = remote_recipe(cluster, tmp_path / "run", steps, rollout=rollout)
    table["cluster"]["pools"]["loops"] = {"nodes": 2, "cpus_per_node": 1}
    run = understudy.train(table, progress=False).dir
    assert_every_row_trained(run, ROWS * steps)
    assert len(re.findall(r"_0_0 is begun again", (run / "logs" / "trainer.log").read_text())) > 2
    whole = understudy.train(ranks_recipe(tmp_path / "whole", steps, rollout=rollout), progress=False).dir
    assert metrics_without_clock(run) == metrics_without_clock(whole)


@HEAD
def test_engines_killed_while_generating_lose_no_row_and_change_no_metric(
    cluster: Any, tmp_path: Path
) -> None:
    add_nodes(cluster)
    steps, long = 14, {"max_new_tokens": 100, "temperature": 8.0}
    table = remote_recipe(cluster, tmp_path / "run", steps, rollout=long)
    process = start_cli("train", str(write_toml(tmp_path / "recipe.toml", table)), "--quiet")
    metrics, log = tmp_path / "run" / "metrics.jsonl", tmp_path / "run" / "logs" / "trainer.log"
    deadline, killed = time.monotonic() + 400, 0
    while process.poll() is None:
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        done = len(metrics.read_text().splitlines()) if metrics.exists() else 0
        if killed < 2 and done >= 2 + 3 * killed:
            (pid,) = re.findall(rf"process rollout-{killed} runs on \S+ \(pid (\d+)\)", log.read_text())
            time.sleep(0.1)
            os.kill(int(pid), signal.SIGKILL)
            killed += 1
        time.sleep(0.05)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and killed == 2, output[-3000:]
    log_text = log.read_text()
    assert log_text.count("engine process lost") == 2 and "is back, with weights" in log_text
    assert_every_row_trained(tmp_path / "run", ROWS * steps)
    whole = understudy.train(ranks_recipe(tmp_path / "whole", steps, rollout=long), progress=False).dir
    assert metrics_without_clock(tmp_path / "run") == metrics_without_clock(whole)


@HEAD
def test_remote_generations_continue_after_a_publish_in_a_fully_async_run(
    cluster: Any, tmp_path: Path
) -> None:
    add_nodes(cluster)
    steps = 8
    table = remote_recipe(
        cluster,
        tmp_path / "run",
        steps,
        rollout={"max_new_tokens": 100, "temperature": 8.0},
        trainer={"mode": "fully_async", "max_staleness": 1},
        run={"determinism": "fast"},
    )
    run = understudy.train(table, progress=False).dir
    assert_every_row_trained(run, ROWS * steps)
    taken = lines(run)
    assert max(line["async/staleness/max"] for line in taken) <= 1
    assert sum(line["async/partial_rollouts"] for line in taken) > 0, (
        "no rollout was in progress at a publish"
    )
