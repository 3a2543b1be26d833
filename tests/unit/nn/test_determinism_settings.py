"""The torch settings of a run that must repeat to the bit; their effect on a GPU is tested in tests/gpu."""

import os
from collections.abc import Iterator

import pytest
import torch

from understudy.nn.determinism import WORKSPACE, keep_to_repeatable

VARIABLE, FIXED = WORKSPACE


@pytest.fixture(autouse=True)
def _restore_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(VARIABLE, "")  # so that monkeypatch restores its value
    monkeypatch.delenv(VARIABLE)
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def test_on_a_gpu_an_operation_without_a_deterministic_algorithm_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keep_to_repeatable(True, "cuda:1")
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert os.environ[VARIABLE] == FIXED
    with pytest.raises(RuntimeError, match="deterministic implementation"):
        torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
    monkeypatch.setenv(VARIABLE, ":16:8")
    keep_to_repeatable(True, "cuda:1")
    assert os.environ[VARIABLE] == ":16:8", "a value set by the user is kept"


def test_on_a_cpu_an_operation_without_a_deterministic_algorithm_only_warns() -> None:
    keep_to_repeatable(True, torch.device("cpu"))
    with pytest.warns(UserWarning, match="deterministic implementation"):
        assert torch.zeros(3).put_(torch.tensor([0]), torch.ones(1)).tolist() == [1, 0, 0]


def test_a_run_without_full_determinism_resets_the_setting_of_an_earlier_run() -> None:
    keep_to_repeatable(True, "cuda")
    keep_to_repeatable(False, "cuda")
    assert not torch.are_deterministic_algorithms_enabled()
