"""Rows of a refused step, saved with everything their update read, for `understudy replay`.

    update ──loss or gradient not finite──> RefusedRows ──save──> .safetensors ──load──> replay ──> RowFinding

The file holds every column of the batch, the reduction weights, the old logprobs and the heads of the
teachers concerned. Under the weights the step started from, they give the same numbers again.

Legend: P loss-bearing tokens of a row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from understudy.errors import DataError
from understudy.policy.assemble import Assembler
from understudy.types.batch import Batch
from understudy.types.jagged import Jagged
from understudy.types.loss import TeacherHead

_PER_ROW = ("rewards", "stop_reasons", "teachers", "media", "origins")
COLUMNS = tuple(one.name for one in fields(Batch) if one.name not in ("keys", *_PER_ROW))
_VALUES, _OFFSETS, _HEAD = ".values", ".offsets", "head."


@dataclass(frozen=True, slots=True)
class RefusedRows:
    """Rows of a refused step, with everything their update read."""

    rows: Batch
    weights: Jagged
    """float32 [P]: reduction weights over the whole batch that the rows were part of."""
    reason: str
    step: int
    """Steps the policy had taken when it refused."""
    old_logprobs: Jagged | None = None
    """float32 [P]."""
    heads: Mapping[str, TeacherHead] = field(default_factory=dict)
    """Heads of the teachers that sent hidden states."""

    def save(self, path: Path, about: Mapping[str, Any] | None = None) -> None:
        """`about` is stored with the rows, for `load`; it must be JSON-able."""
        tensors: dict[str, torch.Tensor] = {}
        jagged = {name: getattr(self.rows, name) for name in COLUMNS}
        for name, column in {**jagged, "weights": self.weights, "old_logprobs": self.old_logprobs}.items():
            if column is not None:
                tensors[name + _VALUES], tensors[name + _OFFSETS] = column.values, column.offsets
        facts = {}
        for name, head in self.heads.items():
            tensors[f"{_HEAD}{name}.weight"] = head.weight_VH
            if head.bias_V is not None:
                tensors[f"{_HEAD}{name}.bias"] = head.bias_V
            facts[name] = {
                "softcap": head.softcap, "logit_scale": head.logit_scale, "temperature": head.temperature
            }  # fmt: skip
        description = {
            "keys": self.rows.keys, **{name: getattr(self.rows, name) for name in _PER_ROW},
            "reason": self.reason, "step": self.step, "heads": facts, "about": dict(about or {}),
        }  # fmt: skip
        # One copy each: columns may share memory, which safetensors does not allow.
        here = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
        save_file(here, path, metadata={"rows": json.dumps(description)})

    @staticmethod
    def load(path: Path) -> tuple[RefusedRows, dict[str, Any]]:
        """Reads what `save` wrote: the rows and `about`."""
        try:
            with safe_open(path, "pt") as file:
                description = json.loads((file.metadata() or {})["rows"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        except Exception as error:
            raise DataError(f"{path} holds no refused rows: {type(error).__name__}: {error}") from None

        def column(name: str) -> Jagged | None:
            if name + _VALUES not in tensors:
                return None
            return Jagged(tensors[name + _VALUES], tensors[name + _OFFSETS])

        columns: dict[str, Any] = {name: column(name) for name in COLUMNS}
        columns |= {name: tuple(description.get(name, ())) for name in _PER_ROW}
        columns["media"] = tuple(tuple(names) for names in columns["media"])
        rows = Batch(tuple(description["keys"]), **columns)
        heads = {
            name: TeacherHead(tensors[f"{_HEAD}{name}.weight"], tensors.get(f"{_HEAD}{name}.bias"), **facts)
            for name, facts in description["heads"].items()
        }
        weights = column("weights")
        assert weights is not None
        return (
            RefusedRows(
                rows, weights, description["reason"], description["step"], column("old_logprobs"), heads
            ),
            description["about"],
        )


def refused_rows(assembler: Assembler, rows: list[int], reason: str, step: int) -> RefusedRows:
    """These rows of a batch with everything their update read."""
    part, old = assembler.rows(rows), assembler.old_logprobs
    return RefusedRows(
        part,
        assembler.weights.select(rows),
        reason,
        step,
        None if old is None else old.select(rows),
        {name: head for name, head in assembler.teacher_heads.items() if name in part.teachers},
    )
