"""Remote rows scored by hedged teachers, teachers with a cache, mixtures, and teachers that follow the student."""

import json
from pathlib import Path
from typing import Any

import pytest
from ray_runs import STORE, lines, metrics_without_clock, ranks_recipe
from test_ray_remote_writers import cluster_with_remote_workers, worker_traffic

import understudy
from understudy.dataplane.ledger import audit

from small_runs import ASSETS  # isort: skip

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]
ROWS, STEPS = 16, 2
MODELS = {name: str(ASSETS / "models" / f"teacher-{name}") for name in ("add", "sort")}
BY_KEY = {name: {"model": model, "key": name} for name, model in MODELS.items()}
WEIGHTS: list[Any] = [{"add": 0.7, "sort": 0.3}] * 6 + [{"add": 1, "sort": 0}] * 4 + [None] * 6
HEAD = pytest.mark.parametrize("cluster", [2], indirect=True, ids=["head-has-cpus"])


def few_rows(folder: Path, count: int, weights: list[Any] | None = None) -> str:
    """Writes the first rows of the data, with teacher weights where given."""
    rows = [json.loads(line) for line in (ASSETS / "data" / "train.jsonl").read_text().splitlines()[:count]]
    for row, own in zip(rows, weights or [], strict=False):
        row["teacher_weights"] = own
    path = folder / "few.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def run_here_and_on_the_cluster(
    cluster: Any, folder: Path, teachers: dict[str, Any], fetched: int = 0, **changes: Any
) -> tuple[Path, Path]:
    """Trains the same recipe here and on the cluster, and checks that metrics, rows and traffic are as they should be.
    `fetched`: remote rows that the trainer's process reads to ask a teacher itself."""
    for _ in range(2):
        cluster.add_node(num_cpus=4, object_store_memory=STORE)
    changes = {"rollout": {"max_new_tokens": 6, "workers": 2}, "trainer": {"batch_size": ROWS}, **changes}

    def run(name: str, **more: Any) -> Path:
        table = ranks_recipe(folder / name, STEPS, **changes, **more)
        return understudy.train({**table, "teachers": teachers}, progress=False).dir

    here, there = run("here"), run("there", **cluster_with_remote_workers(cluster))
    assert metrics_without_clock(there) == metrics_without_clock(here), "every bit should be the same"
    report = audit(there / "dataplane")
    assert report.balanced and (report.trained, report.dead) == (ROWS * STEPS, 0)
    last = lines(there)[-1]
    assert last["perf/workers/rows_judged_here"] == fetched
    if not fetched:
        assert last["perf/queue/bytes_put"] == last["perf/queue/bytes_got"] == 0
    queue_bytes = {name: last[f"perf/queue/bytes_{name}"] for name in ("put", "got")}
    print({name: count / (ROWS * STEPS) for name, count in {**worker_traffic(there), **queue_bytes}.items()})
    return here, there


@HEAD
def test_hedged_scores_of_remote_rows_do_not_change_the_metrics_or_pass_the_trainer(
    cluster: Any, tmp_path: Path
) -> None:
    """Every request is sent to two replicas at once; whichever answers first, the run is the same."""
    teachers = {"add": {"model": MODELS["add"], "replicas": 2, "hedge_after_seconds": 1e-6}}
    _, there = run_here_and_on_the_cluster(cluster, tmp_path, teachers, loss={"topk": 40})
    last = lines(there)[-1]
    assert last["perf/teacher/add/hedges"] >= STEPS
    assert worker_traffic(there)["besides"] / (ROWS * STEPS) < 2500, "two requests per row"


@HEAD
def test_a_teacher_cache_answers_repeated_remote_rows_without_asking_the_teacher(
    cluster: Any, tmp_path: Path
) -> None:
    """Both steps have the same prompts, greedy answers and practically constant weights: the second asks no teacher. A
    teacher with a cache makes the trainer fetch the rows."""
    teachers = {"add": {"model": MODELS["add"], "cache_bytes": 1 << 24}}
    here, there = run_here_and_on_the_cluster(
        cluster,
        tmp_path,
        teachers,
        fetched=ROWS * STEPS,
        loss={"topk": 40},
        data={"train": few_rows(tmp_path, ROWS), "shuffle": False},
        rollout={"max_new_tokens": 6, "workers": 2, "temperature": 0.0},
        trainer={"batch_size": ROWS, "learning_rate": 1e-30},
    )
    hits = [lines(run)[-1]["perf/teacher/add/cache_hits"] for run in (here, there)]
    assert hits == [ROWS, ROWS]


@HEAD
def test_the_trainer_fetches_remote_rows_to_mix_scores_of_several_teachers(
    cluster: Any, tmp_path: Path
) -> None:
    """Rows of a mixture and rows of one teacher share requests: all rows of such a request are fetched."""
    data = {"train": few_rows(tmp_path, ROWS, WEIGHTS), "shuffle": False}
    _, there = run_here_and_on_the_cluster(
        cluster, tmp_path, BY_KEY, fetched=ROWS * STEPS, loss={"topk": 40}, data=data
    )
    assert [line["teacher/add+sort/rows"] for line in lines(there)] == [6] * STEPS


@HEAD
def test_following_teachers_with_prompts_of_their_own_score_remote_rows(cluster: Any, tmp_path: Path) -> None:
    own = {"model": "student", "prompt": "{{ answer }}{{ prompt }}"}
    teachers = {
        "add": {**own, "key": "add", "version": "live"},
        "sort": {**own, "key": "sort", "version": "ema"},
    }
    trainer = {"batch_size": ROWS, "ema_decay": 0.5}
    here, there = run_here_and_on_the_cluster(cluster, tmp_path, teachers, loss={"topk": 40}, trainer=trainer)
    for run in (here, there):
        assert [line["rollout/teacher_version/max"] for line in lines(run)] == [0, 1]


@HEAD
def test_hedges_cache_and_mixtures_work_together_in_a_fully_async_run(cluster: Any, tmp_path: Path) -> None:
    for _ in range(2):
        cluster.add_node(num_cpus=4, object_store_memory=STORE)
    data = {"train": few_rows(tmp_path, ROWS, WEIGHTS), "shuffle": False}
    table = ranks_recipe(
        tmp_path / "run",
        4,
        **cluster_with_remote_workers(
            cluster, rollout={"max_new_tokens": 6, "workers": 2, "temperature": 0.0}
        ),
        loss={"topk": 8},
        data=data,
        trainer={"mode": "fully_async", "max_staleness": 1, "batch_size": ROWS, "learning_rate": 1e-30},
        run={"determinism": "fast"},
    )
    every = {"hedge_after_seconds": 1e-3, "cache_bytes": 1 << 24}
    run = understudy.train(
        {**table, "teachers": {name: {**one, **every} for name, one in BY_KEY.items()}}, progress=False
    ).dir
    report, last = audit(run / "dataplane"), lines(run)[-1]
    assert report.balanced and (report.trained, report.dead) == (4 * ROWS, 0)
    assert last["perf/workers/rows_judged_here"] >= 4 * ROWS
    assert last["perf/teacher/add/cache_hits"] >= 2 * 6, "partial and cross scores of mixtures too"
