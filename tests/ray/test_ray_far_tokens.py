"""Workers bring their tokens to engine processes themselves: bytes through the trainer's process do not depend on what is written."""

import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ray_runs import QUEUE, STORE, figures, lines, ranks_recipe

import understudy
from understudy.assembly import build, teachers
from understudy.dataplane.ledger import audit

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
from small_runs import start_cli, write_toml

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]
ROWS, STEPS = 8, 2
AGENT = {"agent": "two_turns:TwoTurns", "max_new_tokens": 6}
HEAD = pytest.mark.parametrize("cluster", [2], indirect=True, ids=["head-has-cpus"])


def elsewhere(cluster: Any, folder: Path, steps: int, **changes: Any) -> dict[str, Any]:
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
def test_what_passes_the_trainer_does_not_grow_with_what_is_written(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes(cluster)
    told: dict[str, dict[str, float]] = {}
    generation: dict[str, float] = {}
    written: dict[str, float] = {}

    def run(name: str, new: int) -> None:
        hot = {"max_new_tokens": new, "temperature": 8.0}
        there = understudy.train(elsewhere(cluster, tmp_path / name, STEPS, rollout=hot), progress=False).dir
        assert_whole(there, ROWS * STEPS)
        told[name] = through_the_trainer(there)
        generation[name] = lines(there)[-1]["perf/workers/bytes_of_generation"]
        written[name] = sum(line["response_length/mean"] * ROWS for line in lines(there))

    run("short", 8)
    run("long", 64)
    monkeypatch.setattr(build, "brings_tokens", lambda recipe, engine: False)
    run("asked", 64)
    rows = ROWS * STEPS
    for name in told:
        figures_of = {what: count / rows for what, count in told[name].items()}
        print(name, written[name] / rows, sum(figures_of.values()), generation[name] / rows, figures_of)
    alone = {"rollout": {"max_new_tokens": 64, "temperature": 8.0}}
    here = understudy.train(ranks_recipe(tmp_path / "here", STEPS, **alone), progress=False).dir
    assert figures(tmp_path / "long") == figures(here), "to the bit"
    assert figures(tmp_path / "asked") == figures(here)

    short, long, asked = told["short"], told["long"], told["asked"]
    assert written["long"] == written["asked"] > 3 * written["short"]
    assert long["engines/bytes_sent"] == short["engines/bytes_sent"], "names"
    assert long["engines/bytes_received"] == short["engines/bytes_received"], "and that it was done"
    assert abs(generation["long"] - generation["short"]) < 8 * rows, "a count may take a byte more"
    assert abs(sum(long.values()) - sum(short.values())) < 16 * rows
    assert generation["long"] / rows < 400
    assert long["queue/bytes_put"] == long["queue/bytes_got"] == 0
    assert asked["engines/bytes_received"] > 12 * written["asked"], "where the trainer asks, they are counted"
    assert generation["asked"] > 12 * written["asked"]


@HEAD
def test_the_turns_of_an_agent_are_the_same_to_the_bit(cluster: Any, tmp_path: Path) -> None:
    """Its engines are beside the trainer: they listen where workers elsewhere reach them."""
    nodes(cluster)
    table = elsewhere(cluster, tmp_path / "there", STEPS, rollout=AGENT)
    del table["cluster"]["roles"]["rollout"], table["cluster"]["pools"]["write"]
    there = understudy.train(table, progress=False).dir
    assert_whole(there, ROWS * STEPS)
    here = understudy.train(ranks_recipe(tmp_path / "here", STEPS, rollout=AGENT), progress=False).dir
    assert figures(there) == figures(here)
    assert lines(there)[-1]["num_turns/min"] == 2
    assert lines(there)[-1]["perf/workers/bytes_of_generation"] / (ROWS * STEPS) < 800, "of two turns"


@pytest.mark.parametrize(
    ("agent", "steps", "faults"), [("single_turn", 4, (9, 11)), ("two_turns:TwoTurns", 3, (17, 13))]
)
@HEAD
def test_workers_killed_as_they_bring_their_tokens_or_have_what_was_written(
    cluster: Any,
    tmp_path: Path,
    agent: str,
    steps: int,
    faults: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every life of a worker ends by kill -9 in the middle of a generation, and no row is lost or trained twice. Where each row
    is one turn, the batch is composed again of the same rows: no bit tells."""
    for point, passage in zip(("row_worker.bringing", "row_worker.brought"), faults, strict=True):
        monkeypatch.setenv("UNDERSTUDY_FAULT", f"{point}:{passage}")
        cluster.add_node(num_cpus=4, object_store_memory=STORE)
    monkeypatch.delenv("UNDERSTUDY_FAULT")
    rollout = {**AGENT, "agent": agent}
    table = elsewhere(cluster, tmp_path / "run", steps, rollout=rollout)
    table["cluster"]["pools"]["loops"] = {"nodes": 2, "cpus_per_node": 1}
    run = understudy.train(table, progress=False).dir
    assert_whole(run, ROWS * steps)
    assert len(re.findall(r"_0_0 is begun again", (run / "logs" / "trainer.log").read_text())) > 2
    whole = understudy.train(ranks_recipe(tmp_path / "whole", steps, rollout=rollout), progress=False).dir
    if agent == "single_turn":
        assert figures(run) == figures(whole)
    else:  # a row that begins again is written beside later turns of others: the same tokens, other last digits
        losses, expected = ([line["actor/loss"] for line in figures(one)] for one in (run, whole))
        assert losses == pytest.approx(expected, rel=1e-5)
        lengths = [[line["response_length/mean"] for line in figures(one)] for one in (run, whole)]
        assert lengths[0] == lengths[1]


@HEAD
def test_an_engine_killed_as_it_writes_costs_no_row_and_no_bit(cluster: Any, tmp_path: Path) -> None:
    nodes(cluster)
    steps, long = 14, {"max_new_tokens": 100, "temperature": 8.0}
    table = elsewhere(cluster, tmp_path / "run", steps, rollout=long)
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
    said = log.read_text()
    assert said.count("engine process lost") == 2 and "is back, with weights" in said
    assert_whole(tmp_path / "run", ROWS * steps)
    whole = understudy.train(ranks_recipe(tmp_path / "whole", steps, rollout=long), progress=False).dir
    assert figures(tmp_path / "run") == figures(whole)


@HEAD
def test_fully_async_generations_go_on_under_new_weights_past_the_trainer(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes(cluster)
    monkeypatch.setattr(teachers, "_SCORE_TOGETHER", 1)  # how many rows end together is another question
    steps = 8
    told: dict[int, float] = {}
    for new in (10, 100):
        table = elsewhere(
            cluster,
            tmp_path / f"{new}",
            steps,
            rollout={"max_new_tokens": new, "temperature": 8.0},
            trainer={"mode": "fully_async", "max_staleness": 1},
            run={"determinism": "fast"},
        )
        run = understudy.train(table, progress=False).dir
        assert_whole(run, ROWS * steps)
        told[new] = sum(through_the_trainer(run).values()) / (ROWS * steps)
        taken = lines(run)
        assert max(line["async/staleness/max"] for line in taken) <= 1
    print(told)
    assert sum(line["async/partial_rollouts"] for line in taken) > 0, "some were under way when weights came"
    assert abs(told[100] - told[10]) < 0.02 * told[10]
