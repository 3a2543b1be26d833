import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from understudy.cli.main import main
from understudy.errors import RunDirectoryError
from understudy.observability.metrics import MetricsWriter, cut_back, read_metrics, without_clock
from understudy.observability.redact import HIDDEN, redact, redact_text
from understudy.observability.rundir import RunDir, probe_run_dir, write_atomically


def test_a_new_run_gets_its_own_directory_and_never_overwrites_an_existing_run(tmp_path: Path) -> None:
    first = RunDir.create(None, "run", base=tmp_path)
    second = RunDir.create(None, "run", base=tmp_path)
    assert first.path != second.path and first.logs.is_dir()
    write_atomically(first.recipe, "{}")
    with pytest.raises(RunDirectoryError, match=f"understudy resume {first.path}"):
        RunDir.create(str(first.path), "run")
    assert RunDir.open(first.path).path == first.path
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        RunDir.open(second.path)


@pytest.mark.parametrize("command", [["resume"], ["eval"], ["export"]])
def test_commands_on_a_run_with_a_damaged_recipe_name_the_file_and_the_parse_error(
    tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe.json").write_text('{"student": {"mod')
    out = [str(tmp_path / "out")] if command == ["export"] else []
    assert main([*command, str(tmp_path), *out]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"error: {tmp_path / 'recipe.json'} is damaged (Unterminated string" in said, said


def test_a_held_run_lock_names_its_owner_and_is_released_when_the_owner_is_killed(tmp_path: Path) -> None:
    run = RunDir.create(str(tmp_path / "run"), "run")
    code = (
        "import sys, time; from pathlib import Path; from understudy.observability.rundir import RunDir;"
        f"lock = RunDir(Path({str(run.path)!r})).lock(); print('held', flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None and owner.stdout.readline() == "held\n"
    with pytest.raises(RunDirectoryError, match=f"in use by process {owner.pid}"):
        run.lock()
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    run.lock().close()


def test_metrics_are_read_without_a_torn_last_line_and_can_be_cut_back_to_a_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    for step in range(5):
        writer.write(step, {"b": float("nan"), "a": step, "time/step": 0.1, "perf/x": 1})
    writer.close()
    with path.open("a") as handle:
        handle.write('{"step": 5, "torn')
    lines = read_metrics(path)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4] and lines[0]["b"] is None
    assert without_clock(lines[3]) == {"step": 3, "a": 3, "b": None}
    cut_back(path, 2)
    assert [json.loads(text)["step"] for text in path.read_text().splitlines()] == [0, 1, 2]
    cut_back(path, None)
    assert path.read_text() == ""


def test_the_last_line_of_metrics_can_be_completed(tmp_path: Path) -> None:
    """A resume does this when it evaluates the saved step. Later lines follow it."""
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    for step in range(2):
        writer.write(step, {"b": float("nan"), "d": step})
    line = writer.complete(1, {"a": float("inf"), "c": 3.0})
    writer.write(2, {})
    writer.close()
    assert list(line.items()) == [("step", 1), ("a", None), ("b", None), ("c", 3.0), ("d", 1)]
    assert read_metrics(writer.path) == [{"step": 0, "b": None, "d": 0}, line, {"step": 2}]


def test_redact_hides_secrets_of_a_recipe_and_leaves_other_keys() -> None:
    table = {
        "token": "abc",
        "teachers": {"t": {"api_key": "k", "urls": ["http://me:pw@host/x?token=1&a=2"], "token_env": "NAME"}},
        "tokens": 5,
    }
    hidden = redact(table)
    assert hidden["token"] == HIDDEN and hidden["teachers"]["t"]["api_key"] == HIDDEN
    assert hidden["teachers"]["t"]["urls"] == [f"http://{HIDDEN}@host/x?token={HIDDEN}&a=2"]
    assert hidden["teachers"]["t"]["token_env"] == "NAME" and hidden["tokens"] == 5
    assert redact_text("Authorization: Bearer s3cret") == f"Authorization: Bearer {HIDDEN}"
    for url in ("https://s3cret@host/x", "http://:s3cret@host/x", "http://me:s3:cret@host/x"):
        assert redact_text(url) == f"{url.partition('//')[0]}//{HIDDEN}@host/x"
    assert redact_text("mailto me@host, http://host/a@b") == "mailto me@host, http://host/a@b"
    for name in ("apikey", "api-key", "auth", "hf_token", "password"):
        assert redact_text(f"http://host/?{name}=s3cret&a=2") == f"http://host/?{name}={HIDDEN}&a=2"
    for name in ("api-key", "AWS_SECRET_ACCESS_KEY", "hf_token"):
        assert redact({name: "s3cret"}) == {name: HIDDEN}
    assert redact({"key": "math", "ray_auth": "token"}) == {"key": "math", "ray_auth": "token"}, "recipe keys"


def test_a_run_dir_that_cannot_be_created_is_refused_and_probing_leaves_no_folder_behind(
    tmp_path: Path,
) -> None:
    (tmp_path / "afile").write_text("x")
    for wanted in (tmp_path / "afile", tmp_path / "afile" / "run", Path("/proc/x")):
        with pytest.raises(RunDirectoryError, match=r"^run\.dir.*(cannot be written to|is a file)"):
            RunDir.create(str(wanted), "run")
        with pytest.raises(RunDirectoryError, match=r"^run\.dir"):
            probe_run_dir(str(wanted))
    probe_run_dir(str(tmp_path / "new" / "run"))
    assert [path.name for path in tmp_path.iterdir()] == ["afile"]


def test_a_new_run_directory_has_mode_700(tmp_path: Path) -> None:
    run = RunDir.create(str(tmp_path / "deep" / "run"), "small")
    assert run.path.stat().st_mode & 0o777 == 0o700


def test_a_run_directory_whose_launch_ended_before_writing_the_recipe_can_be_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launch was killed, or the disk failed at that moment."""
    begun = RunDir.create(str(tmp_path / "run"), "run")
    lock = begun.lock()
    monkeypatch.setattr(os, "fsync", _failing)
    with pytest.raises(RunDirectoryError, match="cannot be written"):
        write_atomically(begun.recipe, "{}")
    (begun.path / ".recipe.json.12-34.tmp").touch()  # of a killed process
    begun.redacted.touch()
    again = RunDir.create(str(tmp_path / "run"), "run")
    with pytest.raises(RunDirectoryError, match="in use by process"):
        again.lock()
    lock.close()
    again.lock().close()
    (begun.checkpoints / "step-000001").mkdir()
    with pytest.raises(RunDirectoryError, match="is not a run directory"):
        again.check_new()
    (begun.checkpoints / "step-000001").rmdir()
    (begun.path / "notes.txt").touch()
    with pytest.raises(RunDirectoryError, match="is not a run directory"):
        again.check_new()


def _failing(descriptor: int) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_locking_a_run_removes_temporary_files_of_dead_processes_only(tmp_path: Path) -> None:
    run = RunDir.create(str(tmp_path / "run"), "run")
    code = "import os, sys; from understudy.observability.rundir import write_atomically as w; from pathlib import Path; os.replace = lambda *_: os.kill(os.getpid(), 9); w(Path(sys.argv[1]), 'x')"
    subprocess.run([sys.executable, "-c", code, str(run.path / "waits.json")], check=False)
    (run.path / f".other.json.{os.getpid()}-7.tmp").touch()  # of a living process
    assert len(list(run.path.glob(".*.tmp"))) == 2
    with run.lock():
        assert [one.name for one in run.path.glob(".*.tmp")] == [f".other.json.{os.getpid()}-7.tmp"]
