"""Rows with pictures on several machines: rows carry hashes; the bytes are in the shared run directory."""

import json
from pathlib import Path
from typing import Any

import pytest
from ray_runs import QUEUE, STORE, lines, metrics_without_clock, ranks_recipe
from vision_models import folder_of, picture

import understudy
from understudy.dataplane.ledger import audit

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]
STEPS = 2


def rows_in(folder: Path) -> str:
    folder.mkdir()
    rows = []
    for i in range(8):
        (folder / f"{i}.png").write_bytes(picture(("red", "green", "blue")[i % 3], (40, 24), (i, 3)))
        rows.append({"messages": [{"role": "user", "content": "<image>colour?"}], "images": [f"{i}.png"]})
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("cluster", [2], indirect=True, ids=["head-has-cpus"])
def test_workers_ranks_and_teachers_on_other_machines_train_on_pictures_to_the_same_bits(
    cluster: Any, tmp_path: Path
) -> None:
    for _ in range(2):
        cluster.add_node(num_cpus=3, object_store_memory=STORE)
    shown: dict[str, Any] = {
        "student": {"model": str(folder_of("qwen3_vl"))},
        "teachers": {"add": {"model": str(folder_of("qwen3_vl", seed=3))}},
        "data": {"train": rows_in(tmp_path / "data")},
        "rollout": {"max_new_tokens": 6, "workers": 1},
    }
    pools = {"train": {"nodes": 2, "cpus_per_node": 1}, "loops": {"nodes": 1, "cpus_per_node": 1}}
    on_ray = {
        "cluster": {
            "backend": "ray",
            "address": cluster.address,
            "pools": pools,
            "roles": {"student": "train", "workers": "loops"},
        },
        "dataplane": QUEUE,
    }
    here = understudy.train(ranks_recipe(tmp_path / "here", STEPS, **shown), progress=False)
    there = understudy.train(ranks_recipe(tmp_path / "there", STEPS, **shown, **on_ray), progress=False)
    assert metrics_without_clock(there.dir) == metrics_without_clock(here.dir), "every bit should be the same"
    report = audit(there.dir / "dataplane")
    assert report.balanced and (report.trained, report.dead) == (8 * STEPS, 0)
    assert lines(there.dir)[-1]["perf/workers/rows_judged_here"] == 0, (
        "workers, not the trainer, should ask the teacher"
    )
    assert len([one for one in (there.dir / "media").rglob("*") if len(one.name) == 64]) == 8
