"""Workers ask vLLM servers themselves: bytes through the trainer's process do not depend on what is written, and whatever dies or
changes meanwhile costs no row. The servers speak vLLM's routes over a small model; vLLM itself writes where it is installed."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray_runs import QUEUE, STORE, figures, lines, ranks_recipe
from test_ray_far_tokens import assert_whole, through_the_trainer

import understudy
from understudy.assembly import build, teachers

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
from small_runs import ASSETS, start_cli, write_toml
from test_vllm_training import write_student

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]
HERE = Path(__file__).parent
ROWS, STEPS = 8, 2
REAL = os.environ.get("UNDERSTUDY_VLLM_PYTHON", "")
PATHS = os.environ.get("PYTHONPATH", "")
FAKE = HERE.parent / "contract" / "engines"


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """For processes of every node."""
    paths = [str(FAKE / "fake_vllm"), str(FAKE), str(HERE), PATHS]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))


def nodes(cluster: Any, count: int = 2) -> None:
    for _ in range(count):
        cluster.add_node(num_cpus=4, object_store_memory=STORE)


def servers(folder: Path, steps: int, address: str | None, **changes: Any) -> dict[str, Any]:
    """Two servers and two workers on nodes of their own; without an address all of it here, and nobody past the trainer."""
    rollout = {"engine": "vllm", "vllm_python": sys.executable, "replicas": 2, "workers": 2}
    rollout |= changes.pop("rollout", {})
    table: dict[str, Any] = {
        "rollout": rollout,
        "trainer": {"ranks": 1} | changes.pop("trainer", {}),
        "run": {"determinism": "fast"},
        **changes,
    }
    if address is not None:
        pools = {name: {"nodes": 1, "cpus_per_node": 2} for name in ("write", "loops")}
        roles = {"rollout": "write", "workers": "loops"}
        table["cluster"] = {
            "backend": "ray", "address": address, "pools": pools, "roles": roles,
            "start_timeout_seconds": 400.0 if REAL and rollout["vllm_python"] == REAL else 90.0,
        }  # fmt: skip
        table["dataplane"] = QUEUE
    return ranks_recipe(folder, steps, **table)


def passed(run: Path) -> float:
    """Bytes of the whole run through the trainer's process, both ways, but for the batches: it trains on all of them."""
    told = through_the_trainer(run)
    assert told.pop("queue/bytes_put") == 0
    del told["queue/bytes_got"]
    return sum(told.values())


def told(run: Path) -> list[list[float]]:
    """What the rows of each step say; servers merge requests as they come, so the last digits are not told."""
    names = ("actor/loss", "response_length/mean", "rollout/weight_version/min")
    return [[line[name] for name in names] for line in figures(run)]


def test_what_passes_the_trainer_does_not_grow_with_what_servers_write(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes(cluster)
    # Short rows end together and would share scoring requests, long ones less often; what is compared here is what they hold.
    monkeypatch.setattr(teachers, "_SCORE_TOGETHER", 1)
    rows = ROWS * STEPS
    bytes_of: dict[str, float] = {}
    generation: dict[str, float] = {}
    written: dict[str, float] = {}

    def run(name: str, new: int) -> None:
        hot = {"max_new_tokens": new, "temperature": 8.0}
        table = servers(tmp_path / name, STEPS, cluster.address, rollout=hot)
        there = understudy.train(table, progress=False).dir
        assert_whole(there, rows)
        bytes_of[name] = passed(there) / rows
        generation[name] = lines(there)[-1]["perf/workers/bytes_of_generation"] / rows
        written[name] = sum(line["response_length/mean"] * ROWS for line in lines(there)) / rows
        print(name, written[name], bytes_of[name], generation[name], through_the_trainer(there))

    run("short", 8)
    run("long", 64)
    monkeypatch.setattr(build, "brings_tokens", lambda recipe, engine: False)
    run("asked", 64)
    alone = servers(
        tmp_path / "here", STEPS, None, rollout={"max_new_tokens": 64, "temperature": 8.0, "workers": 0}
    )
    here = understudy.train(alone, progress=False).dir

    assert written["long"] == written["asked"] > 2 * written["short"]
    for name in ("long", "asked"):
        assert told(tmp_path / name) == [pytest.approx(step, rel=1e-5) for step in told(here)]
    assert abs(generation["long"] - generation["short"]) < 8, "a count may take a byte more"
    assert abs(bytes_of["long"] - bytes_of["short"]) < 16
    assert generation["long"] < 450
    last = lines(tmp_path / "long")[-1]
    assert last["perf/engines/bytes_sent"] == last["perf/engines/bytes_received"] == 0
    assert lines(tmp_path / "asked")[-1]["perf/engines/bytes_received"] > 12 * written["asked"] * rows


def test_fully_async_generations_are_cut_and_go_on_under_new_weights_past_the_trainer(
    cluster: Any, tmp_path: Path
) -> None:
    """Servers beside the trainer: they get an address that workers elsewhere reach."""
    nodes(cluster)
    steps = 8
    bytes_of: dict[int, float] = {}
    for new in (10, 100):
        table = servers(
            tmp_path / f"{new}", steps, cluster.address,
            rollout={"max_new_tokens": new, "temperature": 8.0, "agent": "two_turns:TwoTurns"},
            trainer={"mode": "fully_async", "max_staleness": 1},
        )  # fmt: skip
        del table["cluster"]["roles"]["rollout"], table["cluster"]["pools"]["write"]
        run = understudy.train(table, progress=False).dir
        assert_whole(run, ROWS * steps)
        bytes_of[new] = passed(run) / (ROWS * steps)
        taken = lines(run)
        assert max(line["async/staleness/max"] for line in taken) <= 1
        assert taken[-1]["perf/engines/bytes_sent"] == 0
    cut = sum(line["async/partial_rollouts"] for line in taken)
    print(bytes_of, cut)
    assert cut > 0, "some were under way when weights came"
    assert bytes_of[100] < bytes_of[10] + 1000, "a cut costs a grant more, whatever was written"


def test_servers_and_workers_killed_as_they_write_cost_no_row(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes(cluster, 1)
    for point, passage in (("row_worker.bringing", 25), ("row_worker.brought", 31)):
        monkeypatch.setenv("UNDERSTUDY_FAULT", f"{point}:{passage}")
        nodes(cluster, 1)
    monkeypatch.delenv("UNDERSTUDY_FAULT")
    steps = 12
    table = servers(
        tmp_path / "run", steps, cluster.address,
        rollout={"max_new_tokens": 100, "temperature": 8.0},
        trainer={"mode": "fully_async", "max_staleness": 1},
    )  # fmt: skip
    table["cluster"]["pools"]["loops"] = {"nodes": 2, "cpus_per_node": 1}
    process = start_cli("train", str(write_toml(tmp_path / "recipe.toml", table)), "--quiet")
    metrics, log = tmp_path / "run" / "metrics.jsonl", tmp_path / "run" / "logs" / "trainer.log"
    deadline, killed = time.monotonic() + 500, 0
    servers_of_the_dead: list[psutil.Process] = []
    while process.poll() is None:
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        done = len(metrics.read_text().splitlines()) if metrics.exists() else 0
        if killed < 2 and done >= 2 + 3 * killed:
            found = re.findall(rf"process vllm-replica-{killed} runs on \S+ \(pid (\d+)\)", log.read_text())
            victim = psutil.Process(int(found[0]))
            # The first with its door; of the second only what is behind the door.
            behind = victim.children()[0]
            (victim if killed == 0 else behind).send_signal(signal.SIGKILL)
            servers_of_the_dead.append(behind)
            killed += 1
        time.sleep(0.05)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and killed == 2, output[-3000:]
    said = log.read_text()
    # Of the second the door may live for a moment longer, and be asked once more before it is started again.
    assert said.count("is back, with weights") >= 2
    assert not any(one.is_running() for one in servers_of_the_dead), "they end with their door"
    assert len(re.findall(r"_0_0 is begun again", said)) > 1
    assert_whole(tmp_path / "run", ROWS * steps)
    assert sum(line["async/partial_rollouts"] for line in lines(tmp_path / "run")) > 0


@contextmanager
def running(dialect: str, model: str, host: str) -> Iterator[str]:
    """The address of a server that is not the run's. It takes its time, so that weights come while it writes."""
    words = [sys.executable, str(HERE / "wire_server_child.py"), dialect, model, "--host", host]
    words += ["--token-seconds", "0.02"]
    pipe = subprocess.PIPE
    child = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True)
    assert child.stdin is not None and child.stdout is not None
    try:
        yield f"http://{host}:{int(child.stdout.readline())}"
    finally:
        child.stdin.close()
        child.wait(20)


def test_running_servers_of_another_dialect_are_asked_by_workers(cluster: Any, tmp_path: Path) -> None:
    """SGLang's: in the pool's place stands `rollout.urls`."""
    nodes(cluster)
    steps, model, host = 6, str(ASSETS / "models" / "student"), cluster.address.rpartition(":")[0]
    with running("sglang", model, host) as first, running("sglang", model, host) as second:
        table = servers(
            tmp_path / "run", steps, cluster.address,
            trainer={"mode": "fully_async", "max_staleness": 1},
            rollout={"engine": "sglang", "urls": [first, second], "snapshots": str(tmp_path / "weights"),
                     "served_model": "student", "max_new_tokens": 100, "temperature": 8.0},
        )  # fmt: skip
        for unused in ("vllm_python", "replicas"):
            del table["rollout"][unused]
        del table["cluster"]["roles"]["rollout"], table["cluster"]["pools"]["write"]
        run = understudy.train(table, progress=False).dir
    assert_whole(run, ROWS * steps)
    last = lines(run)[-1]
    assert last["perf/engines/bytes_sent"] == last["perf/engines/bytes_received"] == 0
    cut = sum(line["async/partial_rollouts"] for line in lines(run))
    print(passed(run) / (ROWS * steps), cut)
    assert cut > 0 and last["rollout/weight_version/min"] > 0


@pytest.mark.vllm
@pytest.mark.skipif(not REAL, reason="set UNDERSTUDY_VLLM_PYTHON to an interpreter that has vLLM")
def test_with_vllm_itself(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(HERE), PATHS])))
    nodes(cluster)
    steps = 4
    table = servers(
        tmp_path / "run", steps, cluster.address,
        student={"model": write_student(tmp_path / "student")},
        rollout={"vllm_python": REAL, "replicas": 1, "max_new_tokens": 64, "temperature": 1.0,
                 "context_length": 128},
        trainer={"mode": "fully_async", "max_staleness": 1, "learning_rate": 1e-3},
    )  # fmt: skip
    run = understudy.train(table, progress=False).dir
    assert_whole(run, ROWS * steps)
    taken = lines(run)
    last = taken[-1]
    print(passed(run) / (ROWS * steps), last["perf/workers/bytes_of_generation"] / (ROWS * steps))
    print(
        [line["async/partial_rollouts"] for line in taken], [line["response_length/mean"] for line in taken]
    )
    assert last["perf/engines/bytes_sent"] == last["perf/engines/bytes_received"] == 0
    assert last["rollout/weight_version/min"] > 0, "written by weights that were published"
