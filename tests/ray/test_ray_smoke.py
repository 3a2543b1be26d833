"""The smallest whole run on Ray: one node, a student and a teacher, rows through TransferQueue, one step."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")
pytest.importorskip("transfer_queue")

import psutil
import ray

import understudy
from understudy.cluster.ray_cluster import RayCluster, RaySettings
from understudy.dataplane.ledger import audit
from understudy.errors import ClusterError

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
from small_runs import ASSETS

pytestmark = pytest.mark.timeout(400)


def test_a_cluster_without_a_token_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ClusterError, match=r"no token for that cluster.*ray get-auth-token"):
        RayCluster(RaySettings(address="192.0.2.1:6379"))
    assert not ray.is_initialized()


def test_one_step_on_a_ray_of_its_own(tmp_path: Path) -> None:
    run = understudy.train(
        {
            "student": {"model": str(ASSETS / "models" / "student"), "device": "cpu"},
            "teachers": {"add": {"model": str(ASSETS / "models" / "teacher-add")}},
            "loss": {"topk": 4},
            "rollout": {"max_new_tokens": 4},
            "data": {"train": str(ASSETS / "data" / "train.jsonl")},
            "trainer": {"steps": 1, "batch_size": 4},
            "dataplane": {"backend": "transfer_queue", "storage_units": 1},
            "cluster": {"backend": "ray"},
            "run": {"dir": str(tmp_path / "run"), "threads": 1},
        },
        progress=False,
    )
    assert run.steps == 1 and run.metrics[0]["actor/loss"] > 0
    report = audit(run.dir / "dataplane")
    assert report.balanced and report.trained == 4
    assert "scores at http://" in (run.dir / "logs" / "teacher-add-0.log").read_text()
    assert not ray.is_initialized()
    names = {process.name() for process in psutil.Process().children(recursive=True)}
    assert not {name for name in names if "raylet" in name or "gcs_server" in name}, "Ray ended with the run"
