"""Rows whose metrics cannot be stored or averaged are refused one by one."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from understudy.errors import DataError
from understudy.trainers.row_columns import FACTS, rollout_columns, rollout_metrics, storable
from understudy.types.trajectory import StopReason, Trajectory


def row(metrics: Any) -> Trajectory:
    zeros = np.zeros(4, np.int32)
    mask = np.array([0, 0, 1, 1], bool)
    return Trajectory("p_0_0", zeros, mask, zeros.astype(np.float32), zeros, StopReason.EOS, metrics=metrics)


@pytest.mark.parametrize("value", [None, "Paris", [1, 2], [1], {"a": 1}, np.zeros(1), np.array("a")])
def test_a_metric_that_is_not_a_number_raises_a_data_error_with_its_row(value: Any) -> None:
    with pytest.raises(DataError, match="row p_0_0 came with the metric 'env/found' = "):
        storable(row({"env/found": value}))


def test_a_metric_whose_name_is_not_text_raises_a_data_error() -> None:
    with pytest.raises(DataError, match=r"the metric 3 = 1\.0"):
        storable(row({3: 1.0}))


@pytest.mark.parametrize("value", [1, 0.5, True, np.float64(2)])
def test_metrics_of_every_number_type_are_averaged(value: Any) -> None:
    rows = [rollout_columns(storable(row({"env/found": one}))) for one in (value, 1.0)]
    metrics = rollout_metrics({name: [one[name] for one in rows] for name in FACTS})
    assert metrics["rollout/env/found"] == (float(value) + 1) / 2


def test_a_metric_of_a_type_that_cannot_be_stored_is_refused() -> None:
    with pytest.raises(DataError, match="cannot be stored"):
        storable(row({"env/found": Fraction(1, 2)}))
