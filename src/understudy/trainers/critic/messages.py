"""What passes between the trainer and a critic in a process of its own: commands and answers as `policy/ranks/wire.py` packs them.

    {"do": "values", "batch", "max_tokens"}              columns ──> values
    {"do": "update", "batch", "max_tokens", "ends_step"} columns, weights ──> {"result"}
    {"do": "skip_step"}
    {"do": "state"} ──> {"progress", "bytes"}            then {"do": "part", "names"} ──> tensors, until all were sent
    {"do": "take"}  tensors, until all were sent         then {"do": "load_state", "progress"}

Every answer says the critic's `step`. A refusal is an answer too: `refused` with the kind of error and its words, and the keys of
the rows that broke an update. A state travels in parts, so that neither side holds it twice. No number is turned into text save
JSON's own of a float, which is exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any

import torch

from understudy import errors
from understudy.errors import PolicyError, UnderstudyError
from understudy.policy.checkpoints.state import PolicyState
from understudy.policy.step import StepResult
from understudy.types.batch import Batch
from understudy.types.loss_metrics import Metric, MetricMax, MetricMin, MetricSum, MetricTotal

PATH = "/v1/command"
PART_BYTES = 256 << 20
"""Of a state at a time; a tensor that is larger goes alone."""
_KINDS: Mapping[str, type[Metric]] = {
    kind.__name__: kind for kind in (MetricSum, MetricTotal, MetricMin, MetricMax)
}
_OUT_OF_MEMORY = torch.OutOfMemoryError.__name__
_MODEL, _OPTIMIZER = "model:", "optimizer:"


def for_critic(batch: Batch) -> Batch:
    """The rows without what teachers said of them. Everything else goes along, also what a critic does not read: its update
    refuses rows of which any number is not finite, and so the step stops before either model is touched."""
    return replace(
        batch, teacher_logprobs=None, teacher_ids=None, teacher_topk_logprobs=None, teacher_hidden=None
    )


def told_of_result(result: StepResult) -> dict[str, Any]:
    """JSON-able; its metrics are on the host already."""
    told = {field.name: getattr(result, field.name) for field in fields(result)}
    told["metrics"] = {name: [type(one).__name__, asdict(one)] for name, one in result.metrics.items()}
    return {**told, "seconds": dict(result.seconds)}


def result_from(told: Mapping[str, Any]) -> StepResult:
    metrics = {name: _KINDS[kind](**numbers) for name, (kind, numbers) in told["metrics"].items()}
    rows = {name: tuple(told[name]) for name in ("row_losses", "row_tokens")}
    return StepResult(**{**told, **rows, "metrics": metrics})


def told_of_refusal(error: UnderstudyError | torch.OutOfMemoryError) -> dict[str, str]:
    # CUDA's own error may come as a subclass; the trainer only knows the one that torch documents.
    kind = _OUT_OF_MEMORY if isinstance(error, torch.OutOfMemoryError) else type(error).__name__
    return {"kind": kind, "message": str(error)}


def refusal_from(told: Mapping[str, str]) -> Exception:
    """The error as it would have been raised in this process."""
    if told["kind"] == _OUT_OF_MEMORY:
        return torch.OutOfMemoryError(told["message"])
    kind = getattr(errors, told["kind"], None)
    known = isinstance(kind, type) and issubclass(kind, UnderstudyError)
    error: Exception = kind(told["message"]) if known and kind is not None else PolicyError(told["message"])
    return error


def state_tensors(state: PolicyState) -> dict[str, torch.Tensor]:
    tensors = {f"{_MODEL}{name}": tensor for name, tensor in state.model.items()}
    return tensors | {f"{_OPTIMIZER}{name}": tensor for name, tensor in state.optimizer.items()}


def state_from(tensors: Mapping[str, torch.Tensor], progress: Mapping[str, Any]) -> PolicyState:
    def under(prefix: str) -> dict[str, torch.Tensor]:
        return {
            name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)
        }

    return PolicyState(under(_MODEL), under(_OPTIMIZER), progress)


def sizes(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    return {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}


def parts(sizes: Mapping[str, int], most: int = PART_BYTES) -> list[list[str]]:
    """Names in their order, cut into parts of at most `most` bytes; every part has one name at least.

    >>> parts({"a": 3, "b": 3, "c": 9, "d": 1}, 6)
    [['a', 'b'], ['c'], ['d']]
    """
    found: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not found or size > room:
            found.append([])
            room = most
        found[-1].append(name)
        room -= size
    return found
