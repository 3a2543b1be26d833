"""Messages between the trainer and a critic in its own process, packed by `policy/ranks/wire.py`.

| command (`do`) | fields                             | tensors          | answer                   |
|----------------|------------------------------------|------------------|--------------------------|
| `values`       | `batch`, `max_tokens`              | columns          | tensors: values          |
| `update`       | `batch`, `max_tokens`, `ends_step` | columns, weights | `result`                 |
| `skip_step`    |                                    |                  |                          |
| `state`        |                                    |                  | `progress`, `bytes`      |
| `part`         | `names`                            |                  | tensors: part of a state |
| `take`         |                                    | part of a state  |                          |
| `load_state`   | `progress`                         |                  |                          |

`part` follows `state`, and `take` precedes `load_state`; each is repeated until all tensors were sent.

Every answer has the critic's `step`. A refusal is an answer with `refused`: the class of the error, its
message, and the keys of the rows that broke an update. A state is sent in parts so that neither side holds it
twice. Floats pass through JSON exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any

import torch

from understudy import errors
from understudy.errors import PolicyError, UnderstudyError
from understudy.policy.step import StepResult
from understudy.types.batch import Batch
from understudy.types.loss_metrics import METRIC_KINDS

PATH = "/v1/command"
PART_BYTES = 256 << 20
"""The size of one part of a state. A larger tensor is a part of its own."""
_OUT_OF_MEMORY = torch.OutOfMemoryError.__name__


def for_critic(batch: Batch) -> Batch:
    """The rows without teacher scores. All other columns are sent, including those a critic does not read.

    The critic's update refuses rows with any number that is not finite, so the step stops before either model
    changes."""
    return replace(
        batch, teacher_logprobs=None, teacher_ids=None, teacher_topk_logprobs=None, teacher_hidden=None
    )


def result_as_json(result: StepResult) -> dict[str, Any]:
    """The result as JSON types. Its metrics must be on the host already."""
    values = {field.name: getattr(result, field.name) for field in fields(result)}
    values["metrics"] = {name: [type(one).__name__, asdict(one)] for name, one in result.metrics.items()}
    return {**values, "seconds": dict(result.seconds)}


def result_from(values: Mapping[str, Any]) -> StepResult:
    metrics = {name: METRIC_KINDS[kind](**numbers) for name, (kind, numbers) in values["metrics"].items()}
    rows = {name: tuple(values[name]) for name in ("row_losses", "row_distill", "row_tokens")}
    return StepResult(**{**values, **rows, "metrics": metrics})


def refusal_as_json(error: UnderstudyError | torch.OutOfMemoryError) -> dict[str, str]:
    # CUDA may raise a subclass. The trainer only handles the class that torch documents.
    kind = _OUT_OF_MEMORY if isinstance(error, torch.OutOfMemoryError) else type(error).__name__
    return {"kind": kind, "message": str(error)}


def refusal_from(refusal: Mapping[str, str]) -> Exception:
    """The error as it would have been raised in this process."""
    if refusal["kind"] == _OUT_OF_MEMORY:
        return torch.OutOfMemoryError(refusal["message"])
    kind = getattr(errors, refusal["kind"], None)
    known = isinstance(kind, type) and issubclass(kind, UnderstudyError)
    error: Exception = (
        kind(refusal["message"]) if known and kind is not None else PolicyError(refusal["message"])
    )
    return error


def sizes(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    return {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}


def parts(sizes: Mapping[str, int], most: int = PART_BYTES) -> list[list[str]]:
    """Names in order, split into parts of at most `most` bytes. Every part has at least one name.

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
