"""Files of a run on a disk that is full and later has space again, simulated by a limit on the file size."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from understudy.errors import RunDirectoryError
from understudy.observability.logs import log_to
from understudy.observability.metrics import MetricsWriter, read_metrics
from understudy.observability.rundir import disk_failure, write_atomically
from understudy.observability.spans import Spans
from understudy.observability.watchdog import watched


@contextmanager
def full_disk() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    "write",
    [
        lambda path: path.write_bytes(bytes(100)),
        lambda path: save_file({"weight": torch.zeros(100)}, path),
        lambda path: Tokenizer(WordLevel({"word": 0, **{f"word {i}": i for i in range(1, 100)}})).save(
            str(path)
        ),
    ],
    ids=["Python", "safetensors", "tokenizers"],
)
def test_disk_failure_recognizes_a_full_disk_in_errors_of_python_safetensors_and_tokenizers(
    tmp_path: Path, write: Callable[[Path], object]
) -> None:
    with full_disk(), pytest.raises(Exception, match="File too large") as raised:
        write(tmp_path / "file")
    failure = disk_failure(raised.value)
    assert failure is not None and failure.errno == errno.EFBIG and failure.strerror == "File too large"
    assert disk_failure(ValueError("(os error 2)")) is None and disk_failure(FileNotFoundError()) is None


def test_a_failed_atomic_write_names_the_file_and_keeps_its_old_content(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_atomically(path, "old")
    with full_disk(), pytest.raises(RunDirectoryError) as raised:
        write_atomically(path, "new" * 100)
    for part in (str(path), "File too large", "Free some space", "understudy resume"):
        assert part in str(raised.value)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path], "a temporary file is left"
    write_atomically(path, "new" * 100)
    assert path.read_text() == "new" * 100


def test_a_metrics_line_that_cannot_be_written_raises_an_error_that_names_the_file(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    with full_disk():
        with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl cannot be written: File too large"):
            writer.write(1, {f"some/key/{number}": number for number in range(20)})
        writer.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_spans_are_written_in_order_again_after_a_full_disk_has_space(tmp_path: Path) -> None:
    spans = Spans(tmp_path / "spans.jsonl")
    with full_disk():
        for number in range(500):  # more than a buffer holds
            with spans.span("produce", step=number):
                pass
        spans.flush()
    with spans.span("produce", step=500):
        pass
    spans.close()
    lines = (tmp_path / "spans.jsonl").read_text().splitlines()
    steps = [json.loads(line).get("step") for line in lines]
    assert steps[0] is None and steps[-1] == 500
    assert steps[1:] == sorted(steps[1:]), "a line is out of order"


def test_logging_to_a_full_disk_prints_no_stack_trace_and_continues_afterwards(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    handler = log_to(tmp_path / "trainer.log")
    logger = logging.getLogger("understudy.of_this_test")
    try:
        with full_disk():
            logger.info("without room %s", "x" * 100)
        logger.info("with room")
    finally:
        logging.getLogger("understudy").removeHandler(handler)
        handler.close()
    assert "with room" in (tmp_path / "trainer.log").read_text()
    assert "Logging error" not in capfd.readouterr().err


def test_the_watchdog_writes_waits_json_again_after_a_full_disk_has_space(tmp_path: Path) -> None:
    path = tmp_path / "waits.json"

    async def run() -> None:
        async with watched(Spans(None), path, 0.05, lambda text: None, dict):
            while not path.exists():
                await asyncio.sleep(0.01)
            with full_disk():
                await asyncio.sleep(0.2)
            path.unlink()
            while not path.exists():
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(run(), 20))
    assert json.loads(path.read_text())["status"] == "ended"


def test_spans_start_on_a_new_line_when_a_killed_trainer_left_half_a_line(tmp_path: Path) -> None:
    """A killed trainer leaves part of a line. The first span of the next launch was once appended to it and lost."""
    path = tmp_path / "spans.jsonl"
    path.write_bytes(b'{"name":"launch","start":0.0,"end":0.0}\n{"name":"upd')
    Spans(path).close()
    Spans(path).close()
    lines = path.read_bytes().splitlines()
    assert [b'"launch"' in line for line in lines] == [True, False, True, True]
