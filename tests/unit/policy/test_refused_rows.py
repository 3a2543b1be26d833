"""Refused rows are saved with every column, their weights and the teachers' heads."""

from pathlib import Path

import pytest
import torch

from understudy.errors import DataError
from understudy.policy.refused import RefusedRows
from understudy.types.batch import Batch
from understudy.types.jagged import Jagged
from understudy.types.loss import TeacherHead


def per_token(*lengths: int, kind: torch.dtype = torch.float32, wide: int = 0) -> Jagged:
    shape = (wide,) if wide else ()
    return Jagged.from_rows([torch.randn(length, *shape).to(kind) for length in lengths])


def test_loading_saved_refused_rows_restores_all_columns_weights_and_teacher_heads(tmp_path: Path) -> None:
    torch.manual_seed(0)
    rows = Batch(
        keys=("a_0_0", "b_0_0"),
        tokens=Jagged.from_rows([torch.arange(4), torch.arange(3)]),
        loss_mask=Jagged.from_rows([torch.tensor([0, 1, 1, 1]).bool(), torch.tensor([0, 1, 1]).bool()]),
        behaviour_logprobs=per_token(4, 3),
        rewards=(1.0, float("nan")),
        stop_reasons=("eos", "length"),
        teachers=("math", "code"),
        origins=("student", "data"),
        teacher_logprobs=per_token(3, 2),
        teacher_hidden=per_token(3, 2, kind=torch.bfloat16, wide=4),
        advantages=Jagged.from_rows([torch.tensor([1.0, float("inf"), 2.0]), torch.zeros(2)]),
    )
    head = TeacherHead(torch.randn(7, 4), torch.randn(7), softcap=30.0, temperature=2.0)
    refused = RefusedRows(rows, per_token(3, 2), "loss nan", 5, per_token(3, 2), {"math": head})
    path = tmp_path / "rows.safetensors"
    refused.save(path, {"role": "student"})
    found, metadata = RefusedRows.load(path)
    assert metadata == {"role": "student"} and found.reason == "loss nan" and found.step == 5
    assert found.rows.keys == rows.keys and found.rows.teachers == rows.teachers
    assert found.rows.origins == rows.origins
    assert found.rows.rewards[0] == 1.0 and found.rows.rewards[1] != found.rows.rewards[1]
    for name in (
        "tokens",
        "loss_mask",
        "behaviour_logprobs",
        "teacher_logprobs",
        "teacher_hidden",
        "advantages",
    ):
        before, after = getattr(rows, name), getattr(found.rows, name)
        assert torch.equal(before.values, after.values) and torch.equal(before.offsets, after.offsets), name
    assert found.rows.teacher_ids is None and found.rows.returns is None
    assert found.old_logprobs is not None and refused.old_logprobs is not None
    assert torch.equal(found.old_logprobs.values, refused.old_logprobs.values)
    assert torch.equal(found.weights.values, refused.weights.values)
    again = found.heads["math"]
    assert torch.equal(again.weight_VH, head.weight_VH) and (again.softcap, again.temperature) == (30.0, 2.0)


def test_loading_a_file_that_holds_no_refused_rows_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "rows.safetensors"
    path.write_text("no rows")
    with pytest.raises(DataError, match="holds no refused rows"):
        RefusedRows.load(path)
