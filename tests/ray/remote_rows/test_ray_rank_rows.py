"""Ranks on several machines fetch their own rows from TransferQueue; the trainer's process gets only those of
rank 0."""

import re
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray_runs import POOL, QUEUE, STORE, lines, metrics_without_clock, ranks_recipe
from small_runs import start_cli, write_toml

import understudy
from understudy.dataplane.ledger import audit

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]
TOPK, NEW, ROWS, STEPS = 32, 6, 16, 2


@pytest.mark.parametrize("cluster", [2], indirect=True, ids=["head-has-cpus"])
def test_ranks_fetch_rows_from_the_queue_and_the_trainer_sends_only_names(
    cluster: Any, tmp_path: Path
) -> None:
    cluster.add_node(num_cpus=3, object_store_memory=STORE)
    wide: dict[str, Any] = {
        "loss": {"topk": TOPK},
        "rollout": {"max_new_tokens": NEW},
        "trainer": {"batch_size": ROWS},
    }
    here = understudy.train(ranks_recipe(tmp_path / "here", STEPS, **wide), progress=False)
    there = understudy.train(
        ranks_recipe(
            tmp_path / "there",
            STEPS,
            cluster={"backend": "ray", "address": cluster.address, **POOL},
            dataplane=QUEUE,
            **wide,
        ),
        progress=False,
    )
    assert metrics_without_clock(there.dir) == metrics_without_clock(here.dir), (
        "the same rows on the same ranks should give the same bits"
    )
    report = audit(there.dir / "dataplane")
    assert report.balanced and report.trained == ROWS * STEPS

    log_text = (there.dir / "logs" / "rank-1.log").read_text()
    other = int(re.findall(r"fetched (\d+) bytes of rows", log_text)[-1])
    mine = int(lines(there.dir)[-1]["perf/ranks/bytes_fetched"])
    written = sum(line["response_length/mean"] * line["rollout/rows"] for line in lines(there.dir))
    teacher = int(written) * (TOPK * 8 + 4)
    assert teacher < mine + other < 1.3 * teacher, "every column once, and one dummy row"
    assert 0.35 < mine / (mine + other) < 0.65, "the trainer's process got rank 0's share"

    by_name, by_column = (lines(run.dir)[-1]["perf/ranks/bytes_sent"] for run in (there, here))
    assert by_name < 150 * ROWS * STEPS, "names, lengths and one weight per row"
    assert by_column > teacher, "without a queue the trainer sends the columns"


@pytest.mark.parametrize("cluster", [2], indirect=True, ids=["head-has-cpus"])
def test_a_run_continues_from_the_run_directory_when_the_queue_is_lost(cluster: Any, tmp_path: Path) -> None:
    """The storage unit is killed between two steps: the log has one warning, and the metrics do not change."""
    cluster.add_node(num_cpus=3, object_store_memory=STORE)
    steps = 25
    here = understudy.train(ranks_recipe(tmp_path / "here", steps), progress=False)
    table = ranks_recipe(
        tmp_path / "run",
        steps,
        cluster={"backend": "ray", "address": cluster.address, **POOL},
        dataplane={**QUEUE, "queue_timeout_seconds": 3.0},
    )
    process = start_cli("train", str(write_toml(tmp_path / "recipe.toml", table)), "--quiet")
    metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 400
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
        assert process.poll() is None and time.monotonic() < deadline, "the run did not take three steps"
        time.sleep(0.05)
    units = [one for one in psutil.process_iter() if "ray::SimpleStorageUnit" in " ".join(one.cmdline())]
    ours = [one for one in units if "raylet" in {parent.name() for parent in one.parents()}]
    mine = {node.all_processes["raylet"][0].process.pid for node in cluster.list_all_nodes()}
    (unit,) = [one for one in ours if mine & {parent.pid for parent in one.parents()}]
    unit.kill()
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output[-3000:]
    log_text = (tmp_path / "run" / "logs" / "trainer.log").read_text()
    assert log_text.count("TransferQueue does not answer") == 1
    assert metrics_without_clock(tmp_path / "run") == metrics_without_clock(here.dir)
    report = audit(tmp_path / "run" / "dataplane")
    assert report.balanced and (report.trained, report.dead) == (8 * steps, 0)


@pytest.mark.parametrize("cluster", [2], indirect=True, ids=["head-has-cpus"])
def test_the_fully_async_trainer_sends_ranks_only_the_names_of_rows(cluster: Any, tmp_path: Path) -> None:
    cluster.add_node(num_cpus=3, object_store_memory=STORE)
    run = understudy.train(
        ranks_recipe(
            tmp_path / "run",
            3,
            cluster={"backend": "ray", "address": cluster.address, **POOL},
            dataplane=QUEUE,
            trainer={"mode": "fully_async"},
            run={"determinism": "fast"},
        ),
        progress=False,
    )
    last = lines(run.dir)[-1]
    assert last["perf/ranks/bytes_fetched"] > 0 and last["perf/ranks/bytes_sent"] < 300 * 8 * 3
    report = audit(run.dir / "dataplane")
    assert report.balanced and report.trained == 24
