"""Evaluated answers are written to samples.jsonl for every type of reference answer."""

import datetime
import json
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from understudy.rollout.dataset import load_dataset
from understudy.trainers.evaluation.evaluate import _keep, eval_prompts
from understudy.types.trajectory import StopReason, Trajectory


@pytest.mark.parametrize(
    ("answer", "written"),
    [
        (Decimal("42.50"), "42.50"),
        (datetime.date(2026, 11, 19), "2026-11-19"),
        (datetime.datetime(2026, 11, 19, 5), "2026-11-19 05:00:00"),
        (b"42", "b'42'"),
        (42, 42),
        (["42", "forty-two"], ["42", "forty-two"]),
    ],
)
def test_samples_jsonl_takes_reference_answers_of_every_parquet_type(
    tmp_path: Path, answer: Any, written: Any
) -> None:
    table = pyarrow.Table.from_pylist([{"prompt": "6 * 7", "answer": answer}])
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    prompts = eval_prompts(load_dataset(tmp_path / "rows.parquet", "data.eval"), None)
    one = Trajectory(
        key="k",
        tokens=np.array([1, 2], np.int32),
        loss_mask=np.array([False, True]),
        behaviour_logprobs=np.array([np.nan, -1.0], np.float32),
        weight_versions=np.array([-1, 0], np.int32),
        stop_reason=StopReason.EOS,
        reward=1.0,
    )
    producer: Any = SimpleNamespace(
        state=SimpleNamespace(run=SimpleNamespace(samples=tmp_path / "samples.jsonl")),
        renderer=SimpleNamespace(decode=str),
    )
    _keep(producer, 3, prompts, [one], "student")
    (line,) = map(json.loads, (tmp_path / "samples.jsonl").read_text().splitlines())
    assert line["answer"] == written and line["step"] == 3
