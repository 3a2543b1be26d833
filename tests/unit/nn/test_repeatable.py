"""What torch is told where a run must repeat to the bit; what it then does on a GPU is in tests/gpu."""

import os
from collections.abc import Iterator

import pytest
import torch

from understudy.nn.determinism import WORKSPACE, keep_to_repeatable

VARIABLE, FIXED = WORKSPACE


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(VARIABLE, "")  # so that it is put back to what it was
    monkeypatch.delenv(VARIABLE)
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def test_a_gpu_is_held_to_it_strictly(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_to_repeatable(True, "cuda:1")
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert os.environ[VARIABLE] == FIXED
    with pytest.raises(RuntimeError, match="deterministic implementation"):
        torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
    monkeypatch.setenv(VARIABLE, ":16:8")
    keep_to_repeatable(True, "cuda:1")
    assert os.environ[VARIABLE] == ":16:8", "what a user has set stays"


def test_on_a_cpu_an_operation_torch_does_not_vouch_for_is_done() -> None:
    keep_to_repeatable(True, torch.device("cpu"))
    with pytest.warns(UserWarning, match="deterministic implementation"):
        assert torch.zeros(3).put_(torch.tensor([0]), torch.ones(1)).tolist() == [1, 0, 0]


def test_what_one_run_asked_for_does_not_stay_for_the_next() -> None:
    keep_to_repeatable(True, "cuda")
    keep_to_repeatable(False, "cuda")
    assert not torch.are_deterministic_algorithms_enabled()
