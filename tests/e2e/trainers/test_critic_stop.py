"""A stop request while the critic's process is stalled."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from small_runs import run_cli, start_cli, until_no_progress, write_toml
from test_critic_process import ppo

from understudy.dataplane.ledger import audit
from understudy.observability.metrics import read_metrics
from understudy.observability.rundir import read_json

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("mode", "how"), [("sync", signal.SIGTERM), ("fully_async", signal.SIGINT)])
def test_a_suspended_critic_does_not_delay_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, how: signal.Signals
) -> None:
    """The critic's updates since the last checkpoint cannot be saved without it: a resume continues from that one."""
    here, path = str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [here, path])))
    table = ppo(tmp_path, "run", {"process": True}, mode=mode, steps=5000, checkpoint_every=2)
    run = tmp_path / "run"
    process = start_cli("train", str(write_toml(tmp_path / "r.toml", table)), "--quiet")
    try:
        deadline = time.monotonic() + 150
        while len(read_metrics(run / "metrics.jsonl")) < 3:
            assert process.poll() is None and time.monotonic() < deadline, "no steps were taken"
            time.sleep(0.1)
        (critic,) = psutil.Process(process.pid).children(recursive=True)
        critic.suspend()
        until_no_progress(process, run)
        process.send_signal(how)
        signalled = time.monotonic()
        output, _ = process.communicate(timeout=100)
        took = time.monotonic() - signalled
    finally:
        process.kill()
        process.communicate()
    saved = [int(folder.name.removeprefix("step-")) for folder in (run / "checkpoints").glob("step-*")]
    assert read_json(run / "state.json")["status"] == "stopped", output
    assert process.returncode == 130 and "Traceback" not in output, output
    assert f"stopped after step {max(saved)}; continue with: understudy resume {run}" in output, output
    assert took < 30, f"{took:.0f} s"
    psutil.wait_procs([critic], timeout=1)
    assert not critic.is_running() or critic.status() == psutil.STATUS_ZOMBIE
    log_text = (run / "logs" / "trainer.log").read_text()
    assert (
        "the critic lives and has done nothing for" in log_text
        and f"the run stays at step {max(saved)}" in log_text
    )
    assert audit(run).balanced
    more = max(saved) + 2
    code, output = run_cli("resume", str(run), f"trainer.steps={more}", "--quiet")
    assert code == 0, output
    assert [line["step"] for line in read_metrics(run / "metrics.jsonl")] == list(range(1, more + 1))
    report = audit(run)
    assert report.balanced and report.trained == more * 12, "every row once"
