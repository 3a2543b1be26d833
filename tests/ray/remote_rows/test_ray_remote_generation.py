"""Workers and engine processes on other nodes: generations pass the trainer; deaths and new weights cost no row."""

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from ray_runs import QUEUE, STORE, figures, lines, ranks_recipe
from small_runs import start_cli, write_toml

import understudy
from understudy.dataplane.ledger import audit

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]
ROWS, STEPS = 8, 2
AGENT = {"agent": "two_turns:TwoTurns", "max_new_tokens": 6}
HEAD = pytest.mark.parametrize("cluster", [2], indirect=True, ids=["head-has-cpus"])


def remote(cluster: Any, folder: Path, steps: int, **changes: Any) -> dict[str, Any]:
    """Two ranks, the first beside the trainer; two engines and two workers on nodes of their own."""
    pools = {name: {"nodes": 1, "cpus_per_node": 2} for name in ("write", "loops")}
    pools["train"] = {"nodes": 2, "cpus_per_node": 1}
    roles = {"student": "train", "rollout": "write", "workers": "loops"}
    settled = {"rollout": {"processes": 2, "workers": 2} | changes.pop("rollout", {})}
    return ranks_recipe(
        folder,
        steps,
        **settled,
        **changes,
        cluster={"backend": "ray", "address": cluster.address, "pools": pools, "roles": roles},
        dataplane=QUEUE,
    )


def nodes(cluster: Any) -> None:
    for _ in range(2):
        cluster.add_node(num_cpus=4, object_store_memory=STORE)


def through_the_trainer(run: Path) -> dict[str, float]:
    """Bytes of the whole run, both ways; of batches only what ranks are sent, since rank 0 trains in that process."""
    last = lines(run)[-1]
    return {
        name: last.get(f"perf/{name}", 0.0)
        for name in (
            "workers/bytes_sent", "workers/bytes_received", "engines/bytes_sent", "engines/bytes_received",
            "queue/bytes_put", "queue/bytes_got", "ranks/bytes_sent",
        )
    }  # fmt: skip


def assert_whole(run: Path, rows: int) -> None:
    report = audit(run / "dataplane")
    assert report.balanced and (report.trained, report.dead) == (rows, 0)


@HEAD
def test_generations_pass_the_trainer_and_rows_do_not(cluster: Any, tmp_path: Path) -> None:
    nodes(cluster)
    rows = ROWS * STEPS
    generation: dict[int, float] = {}
    besides: dict[int, float] = {}
    written: dict[int, float] = {}
    for new in (8, 64):
        hot = {"max_new_tokens": new, "temperature": 8.0}
        there = understudy.train(remote(cluster, tmp_path / f"{new}", STEPS, rollout=hot), progress=False).dir
        assert_whole(there, rows)
        passed = through_the_trainer(there)
        generation[new] = lines(there)[-1]["perf/workers/bytes_of_generation"]
        engines = passed["engines/bytes_sent"] + passed["engines/bytes_received"]
        besides[new] = sum(passed.values()) - generation[new] - engines
        written[new] = sum(line["response_length/mean"] * ROWS for line in lines(there))
        assert passed["queue/bytes_put"] == passed["queue/bytes_got"] == 0
    alone = {"rollout": {"max_new_tokens": 64, "temperature": 8.0}}
    here = understudy.train(ranks_recipe(tmp_path / "here", STEPS, **alone), progress=False).dir
    assert figures(tmp_path / "64") == figures(here), "to the bit"

    print(generation, besides, written)
    assert written[64] > 3 * written[8]
    a_token = (generation[64] - generation[8]) / (written[64] - written[8])
    assert a_token == pytest.approx(12, rel=0.05), "id, logprob, weight version"
    assert abs(besides[64] - besides[8]) < 16 * rows, "columns and scores do not pass"


@HEAD
def test_the_turns_of_an_agent_are_the_same_to_the_bit(cluster: Any, tmp_path: Path) -> None:
    """Its engines are beside the trainer."""
    nodes(cluster)
    table = remote(cluster, tmp_path / "there", STEPS, rollout=AGENT)
    del table["cluster"]["roles"]["rollout"], table["cluster"]["pools"]["write"]
    there = understudy.train(table, progress=False).dir
    assert_whole(there, ROWS * STEPS)
    here = understudy.train(ranks_recipe(tmp_path / "here", STEPS, rollout=AGENT), progress=False).dir
    assert figures(there) == figures(here)
    assert lines(there)[-1]["num_turns/min"] == 2


@pytest.mark.parametrize(
    ("agent", "steps", "faults"), [("single_turn", 4, (9, 11)), ("two_turns:TwoTurns", 3, (17, 13))]
)
@HEAD
def test_workers_killed_in_a_generation_cost_no_row_and_no_bit(
    cluster: Any,
    tmp_path: Path,
    agent: str,
    steps: int,
    faults: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every life of a worker ends by kill -9 in the middle of a generation, and no row is lost or trained twice. Its sessions
    get the generations that they had, so the engine's batches are those of a run without deaths."""
    for point, passage in zip(("worker.asked", "worker.answered"), faults, strict=True):
        monkeypatch.setenv("UNDERSTUDY_FAULT", f"{point}:{passage}")
        cluster.add_node(num_cpus=4, object_store_memory=STORE)
    monkeypatch.delenv("UNDERSTUDY_FAULT")
    rollout = {**AGENT, "agent": agent}
    table = remote(cluster, tmp_path / "run", steps, rollout=rollout)
    table["cluster"]["pools"]["loops"] = {"nodes": 2, "cpus_per_node": 1}
    run = understudy.train(table, progress=False).dir
    assert_whole(run, ROWS * steps)
    assert len(re.findall(r"_0_0 is begun again", (run / "logs" / "trainer.log").read_text())) > 2
    whole = understudy.train(ranks_recipe(tmp_path / "whole", steps, rollout=rollout), progress=False).dir
    assert figures(run) == figures(whole)


@HEAD
def test_an_engine_killed_as_it_writes_costs_no_row_and_no_bit(cluster: Any, tmp_path: Path) -> None:
    nodes(cluster)
    steps, long = 14, {"max_new_tokens": 100, "temperature": 8.0}
    table = remote(cluster, tmp_path / "run", steps, rollout=long)
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
    assert_whole(tmp_path / "run", ROWS * steps)
    whole = understudy.train(ranks_recipe(tmp_path / "whole", steps, rollout=long), progress=False).dir
    assert figures(tmp_path / "run") == figures(whole)


@HEAD
def test_fully_async_generations_go_on_under_new_weights(cluster: Any, tmp_path: Path) -> None:
    nodes(cluster)
    steps = 8
    table = remote(
        cluster,
        tmp_path / "run",
        steps,
        rollout={"max_new_tokens": 100, "temperature": 8.0},
        trainer={"mode": "fully_async", "max_staleness": 1},
        run={"determinism": "fast"},
    )
    run = understudy.train(table, progress=False).dir
    assert_whole(run, ROWS * steps)
    taken = lines(run)
    assert max(line["async/staleness/max"] for line in taken) <= 1
    assert sum(line["async/partial_rollouts"] for line in taken) > 0, "some were under way when weights came"
