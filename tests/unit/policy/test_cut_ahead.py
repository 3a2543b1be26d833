"""Micro-batches that a thread prepares while the previous one is computed."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from small_student import token_mean, varied_batch

from understudy.policy.assemble import Assembler
from understudy.policy.microbatch import Layout

PASSES = [([4, 0], True), ([1], True), ([2, 3, 5], True), ([1], False)]
DEVICES = ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_cut_ahead_yields_the_micro_batches_of_cut_in_their_order(device: str) -> None:
    batch = varied_batch()
    assembler = Assembler(batch, token_mean(batch)).hold()
    found = list(assembler.cut_ahead(PASSES, Layout.PACKED, torch.device(device)))
    for (micro, counted), (rows, expected) in zip(found, PASSES, strict=True):
        plain = assembler.cut(rows, Layout.PACKED, dummy=not expected)
        assert counted is expected and micro.keys == plain.keys and micro.lengths == plain.lengths
        for mine, theirs in (
            (micro.ids, plain.ids),
            (micro.predict_N, plain.predict_N),
            (micro.inputs.weights_N, plain.inputs.weights_N),
        ):
            assert mine.device.type == device and mine.shape == theirs.shape
            assert device == "meta" or torch.equal(mine.cpu(), theirs)
        assert micro.inputs.max_id == plain.inputs.max_id


def test_one_micro_batch_is_cut_ahead_of_the_consumer_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = varied_batch()
    assembler = Assembler(batch, token_mean(batch)).hold()
    begun, plain = [threading.Event() for _ in PASSES], assembler.cut
    count = iter(begun)

    def cut(rows: Sequence[int], *arguments: Any, **options: Any) -> Any:
        next(count).set()
        return plain(rows, *arguments, **options)

    monkeypatch.setattr(assembler, "cut", cut)
    micros = assembler.cut_ahead(PASSES, Layout.PACKED, torch.device("meta"))
    next(micros)
    assert begun[1].wait(10) and not begun[2].is_set(), "two micro-batches were cut ahead"
    micros.close()  # type: ignore[attr-defined]
    assert not any(one.name.startswith("cut") for one in threading.enumerate())


def test_an_error_while_cutting_is_raised_at_the_micro_batch_that_caused_it() -> None:
    batch = varied_batch()
    assembler = Assembler(batch, token_mean(batch)).hold()
    micros = assembler.cut_ahead([([0], True), ([999], True)], Layout.PACKED, torch.device("meta"))
    next(micros)
    with pytest.raises(IndexError):
        next(micros)
