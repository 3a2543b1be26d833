"""Errors of torch about memory and determinism are explained with the recipe keys to change."""

import pytest
import torch

from understudy.config import Recipe
from understudy.errors import DataError, PolicyError
from understudy.run.launch import explained

RECIPE = Recipe.model_validate(
    {
        "student": {"model": "a"},
        "teachers": {"t": {"model": "b"}},
        "data": {"train": "rows.jsonl"},
        "trainer": {"steps": 1, "micro_batch_tokens": 65536},
    }
)
MESSAGE = (
    "CUDA out of memory. Tried to allocate 256.00 MiB. GPU 0 has a total capacity of 139.80 GiB of which 209.94 MiB is free. \n"
    "Process 664 has 610.00 MiB memory in use. If reserved but unallocated memory is large try setting \n"
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
)


def test_an_out_of_memory_error_on_the_gpu_names_the_sizes_and_the_keys_to_set() -> None:
    explanation = explained(torch.OutOfMemoryError(MESSAGE), RECIPE)
    assert isinstance(explanation, PolicyError)
    first, *ways = str(explanation).splitlines()
    assert first.startswith(
        "the GPU's memory is full: Tried to allocate 256.00 MiB. The GPU has a total capacity of 139.80"
    )
    assert "PYTORCH" not in str(explanation)
    assert "trainer.micro_batch_tokens (now 65536)" in ways[0]
    assert "rollout.max_batch (now" in ways[1]
    assert "student.gradient_checkpointing = true" in ways[2]


def test_an_out_of_memory_error_of_the_driver_names_the_keys_to_set() -> None:
    """Other processes hold the GPU's memory: the driver refuses before torch's allocator counts anything."""
    text = "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in https://docs.nvidia.com/cuda"
    explanation = explained(torch.AcceleratorError(text), RECIPE)
    assert isinstance(explanation, PolicyError)
    assert "the GPU's memory is full: the driver has none left; `nvidia-smi` lists" in str(explanation)
    assert "trainer.micro_batch_tokens" in str(explanation) and "docs.nvidia.com" not in str(explanation)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("can't start new thread"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes"),
    ],
)
def test_an_out_of_memory_error_of_the_host_names_the_keys_to_set_and_the_resume_command(
    error: Exception,
) -> None:
    explanation = str(explained(error, RECIPE))
    for part in ("out of memory", "understudy resume", "trainer.micro_batch_tokens (now 65536)", "replicas"):
        assert part in explanation


def test_other_errors_are_returned_unchanged() -> None:
    error = DataError("a row")
    assert explained(error, RECIPE) is error


def test_a_nondeterministic_operation_is_named_with_the_key_that_allows_it() -> None:
    with pytest.raises(RuntimeError) as refused:
        _refused_by_torch()
    explanation = explained(refused.value, RECIPE)
    assert isinstance(explanation, PolicyError)
    assert "torch's put_" in str(explanation) and "run.determinism = 'fast'" in str(explanation)


def _refused_by_torch() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2), accumulate=False)
    finally:
        torch.use_deterministic_algorithms(False)
