"""`rollout.engine = "vllm"` in a pool: the server is on another node, is reached over the network, and gets new
weights."""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray_runs import STORE, metrics_without_clock, ranks_recipe
from vllm_student import write_student

import understudy
from understudy.dataplane.ledger import audit

HERE = Path(__file__).parent
pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]
REAL = os.environ.get("UNDERSTUDY_VLLM_PYTHON", "")


@pytest.mark.parametrize(
    "server",
    [
        "stand-in",
        pytest.param(
            "vllm",
            marks=[
                pytest.mark.vllm,
                pytest.mark.skipif(
                    not REAL, reason="set UNDERSTUDY_VLLM_PYTHON to an interpreter that has vLLM"
                ),
            ],
        ),
    ],
)
def test_a_vllm_server_on_another_node_gets_every_version_of_the_weights(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: str
) -> None:
    fake = HERE.parent / "contract" / "engines"
    paths = [str(fake / "fake_vllm"), str(fake)] if server == "stand-in" else []
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]))
    for _ in range(2):
        cluster.add_node(num_cpus=1, object_store_memory=STORE)
    table = ranks_recipe(
        tmp_path / "run",
        3,
        student={"model": write_student(tmp_path / "student")},
        trainer={"ranks": 1, "learning_rate": 1e-2},
        rollout={
            "engine": "vllm",
            "vllm_python": sys.executable if server == "stand-in" else REAL,
            "context_length": 64,
        },
        cluster={
            "backend": "ray",
            "address": cluster.address,
            "start_timeout_seconds": 400.0,
            "pools": {"write": {"nodes": 1, "cpus_per_node": 1}},
            "roles": {"rollout": "write"},
        },
        run={"determinism": "fast"},
    )
    run = understudy.train(table, progress=False)
    report = audit(run.dir / "dataplane")
    assert report.balanced and (report.trained, report.dead) == (24, 0)
    log = (run.dir / "logs" / "trainer.log").read_text()
    assert "process vllm-replica-0 runs on" in log
    for version in range(4):
        assert f"weights of version {version}: 1 of 1 remote engine processes have them" in log
    lines = metrics_without_clock(run.dir)
    assert [line["rollout/weight_version/min"] for line in lines] == [0, 1, 2], (
        "each step should be generated with the newest weights"
    )
    assert np.isfinite([line["actor/loss"] for line in lines]).all()
    assert not list(Path("/dev/shm").glob("understudy-weights-*/v[0-3].safetensors"))
