"""The smallest whole run on Ray: one node, a student and a teacher, rows through TransferQueue, one step."""

import contextlib
import time
from pathlib import Path

import pytest

pytest.importorskip("ray")
pytest.importorskip("transfer_queue.metadata")

import psutil
import ray
from small_runs import ASSETS, start_cli, write_toml

from understudy.cluster.ray_cluster import RayCluster, RaySettings
from understudy.dataplane.ledger import audit
from understudy.errors import ClusterError
from understudy.observability.metrics import read_metrics

pytestmark = pytest.mark.timeout(400)


def test_a_cluster_without_a_token_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ClusterError, match=r"no token for that cluster.*ray get-auth-token"):
        RayCluster(RaySettings(address="192.0.2.1:6379"))
    assert not ray.is_initialized()


def test_a_run_takes_one_step_on_a_ray_of_its_own_and_leaves_no_ray_process(tmp_path: Path) -> None:
    """The run is a process of its own, as from the command line: Ray forks, which a process with torch's process groups
    does not survive."""
    table = {
        "student": {"model": str(ASSETS / "models" / "student"), "device": "cpu"},
        "teachers": {"add": {"model": str(ASSETS / "models" / "teacher-add")}},
        "loss": {"topk": 4},
        "rollout": {"max_new_tokens": 4},
        "data": {"train": str(ASSETS / "data" / "train.jsonl")},
        "trainer": {"steps": 1, "batch_size": 4},
        "dataplane": {"backend": "transfer_queue", "storage_units": 1},
        "cluster": {"backend": "ray"},
        "run": {"dir": str(tmp_path / "run"), "threads": 1},
    }
    process = start_cli("train", str(write_toml(tmp_path / "recipe.toml", table)), "--quiet", fork=False)
    family: dict[psutil.Process, str] = {}
    while process.poll() is None:
        # Only children of the command: the test process has children of other tests.
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    family[child] = child.name()
        time.sleep(0.5)
    output, _ = process.communicate()
    assert process.returncode == 0, output[-3000:]
    (line,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert line["actor/loss"] > 0
    report = audit(tmp_path / "run" / "dataplane")
    assert report.balanced and report.trained == 4
    assert "scores at http://" in (tmp_path / "run" / "logs" / "teacher-add-0.log").read_text()
    assert {"raylet", "gcs_server"} <= set(family.values())
    deadline = time.monotonic() + 20
    while left := [name for child, name in family.items() if child.is_running()]:
        assert time.monotonic() < deadline, f"Ray did not end with the run: {left}"
        time.sleep(0.2)
