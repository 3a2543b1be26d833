"""Remote rows scored by teachers of every kind: hedged, with a cache, and mixtures of several."""

import json
from pathlib import Path
from typing import Any

import pytest
from ray_runs import STORE, figures, lines, ranks_recipe
from test_ray_remote_writers import on_two_nodes, traffic

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
    """The first rows of the data, with a mixture of teachers each where given."""
    rows = [json.loads(line) for line in (ASSETS / "data" / "train.jsonl").read_text().splitlines()[:count]]
    for row, own in zip(rows, weights or [], strict=False):
        row["teacher_weights"] = own
    path = folder / "few.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def both(
    cluster: Any, folder: Path, teachers: dict[str, Any], fetched: int = 0, **changes: Any
) -> tuple[Path, Path]:
    """The same run here and on the cluster, with what both promise checked. `fetched`: remote rows that the
    trainer's process reads to ask a teacher itself."""
    for _ in range(2):
        cluster.add_node(num_cpus=4, object_store_memory=STORE)
    changes = {"rollout": {"max_new_tokens": 6, "workers": 2}, "trainer": {"batch_size": ROWS}, **changes}

    def run(name: str, **more: Any) -> Path:
        table = ranks_recipe(folder / name, STEPS, **changes, **more)
        return understudy.train({**table, "teachers": teachers}, progress=False).dir

    here, there = run("here"), run("there", **on_two_nodes(cluster))
    assert figures(there) == figures(here), "to the bit"
    report = audit(there / "dataplane")
    assert report.balanced and (report.trained, report.dead) == (ROWS * STEPS, 0)
    last = lines(there)[-1]
    assert last["perf/workers/rows_judged_here"] == fetched
    if not fetched:
        assert last["perf/queue/bytes_put"] == last["perf/queue/bytes_got"] == 0
    queue_bytes = {name: last[f"perf/queue/bytes_{name}"] for name in ("put", "got")}
    print({name: count / (ROWS * STEPS) for name, count in {**traffic(there), **queue_bytes}.items()})
    return here, there


@HEAD
def test_the_quicker_of_two_answers_counts_and_neither_passes_the_trainer(
    cluster: Any, tmp_path: Path
) -> None:
    """Every request is asked twice at once: whichever comes first, the run is the same."""
    teachers = {"add": {"model": MODELS["add"], "replicas": 2, "hedge_after_seconds": 1e-6}}
    _, there = both(cluster, tmp_path, teachers, loss={"topk": 40})
    last = lines(there)[-1]
    assert last["perf/teacher/add/hedges"] >= STEPS
    assert traffic(there)["besides"] / (ROWS * STEPS) < 2500, "two requests a row"


@HEAD
def test_a_teacher_with_a_cache_fetches_rows_and_is_asked_once_about_the_same_tokens(
    cluster: Any, tmp_path: Path
) -> None:
    """The same prompts twice, greedily, under weights that do not move: the second step asks no teacher."""
    teachers = {"add": {"model": MODELS["add"], "cache_bytes": 1 << 24}}
    here, there = both(
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
def test_mixtures_of_remote_rows_are_mixed_by_the_trainer(cluster: Any, tmp_path: Path) -> None:
    """Rows of a mixture beside rows of one teacher, in the same requests: all rows of such a request are
    fetched."""
    data = {"train": few_rows(tmp_path, ROWS, WEIGHTS), "shuffle": False}
    _, there = both(cluster, tmp_path, BY_KEY, fetched=ROWS * STEPS, loss={"topk": 40}, data=data)
    assert [line["teacher/add+sort/rows"] for line in lines(there)] == [6] * STEPS


@HEAD
def test_teachers_that_follow_the_student_score_remote_rows_after_prompts_of_their_own(
    cluster: Any, tmp_path: Path
) -> None:
    own = {"model": "student", "prompt": "{{ answer }}{{ prompt }}"}
    teachers = {
        "add": {**own, "key": "add", "version": "live"},
        "sort": {**own, "key": "sort", "version": "ema"},
    }
    trainer = {"batch_size": ROWS, "ema_decay": 0.5}
    here, there = both(cluster, tmp_path, teachers, loss={"topk": 40}, trainer=trainer)
    for run in (here, there):
        assert [line["rollout/teacher_version/max"] for line in lines(run)] == [0, 1]


@HEAD
def test_all_of_it_at_once_row_by_row_in_a_fully_async_run(cluster: Any, tmp_path: Path) -> None:
    for _ in range(2):
        cluster.add_node(num_cpus=4, object_store_memory=STORE)
    data = {"train": few_rows(tmp_path, ROWS, WEIGHTS), "shuffle": False}
    table = ranks_recipe(
        tmp_path / "run",
        4,
        **on_two_nodes(cluster, rollout={"max_new_tokens": 6, "workers": 2, "temperature": 0.0}),
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
