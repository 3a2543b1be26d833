"""Weights are broadcast in buckets: they arrive bit for bit, or the transfer ends within seconds."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from understudy.weights.broadcast import (
    GroupOrder,
    PackedWeights,
    Receiver,
    Rendezvous,
    Stage,
    StreamOrder,
    TransferBroken,
    notes_of,
    plan,
    send,
)

Named = list[tuple[str, torch.Tensor]]


def weights(seed: int = 0) -> Named:
    """All dtypes that models have, sizes that are not multiples of the alignment, and a tensor larger than a bucket."""
    made = torch.Generator().manual_seed(seed)
    shapes = [(7, 3), (), (1000,), (33, 65), (0, 4), (5,)]
    kinds = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
    named: Named = [
        (f"w{i}", torch.randn(shape, generator=made).to(kinds[i % 4])) for i, shape in enumerate(shapes)
    ]
    named.append(("ids", torch.randint(-9, 9, (13,), generator=made)))
    named.append(("turned", torch.randn(6, 8, generator=made).T))
    named.append(("nan", torch.tensor([float("nan"), float("inf"), -0.0])))
    return named


def bits(named: Named) -> list[tuple[str, torch.dtype, tuple[int, ...], bytes]]:
    return [
        (name, t.dtype, tuple(t.shape), t.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        for name, t in named
    ]


def orders(rendezvous: Rendezvous, name: str, size: int, stall_s: float = 20.0) -> list[GroupOrder]:
    return [GroupOrder(rendezvous.host, rendezvous.port, name, rank, size, stall_s) for rank in range(size)]


@given(sizes=st.lists(st.integers(0, 50), min_size=1, max_size=12), most=st.integers(1, 300))
@settings(max_examples=60, deadline=None)
def test_buckets_hold_every_tensor_once_aligned_and_within_their_size(sizes: list[int], most: int) -> None:
    notes = notes_of([(f"t{i}", torch.zeros(size)) for i, size in enumerate(sizes)])
    buckets = plan(notes, most)
    pieces = [piece for bucket in buckets for piece in bucket.pieces]
    assert [piece.name for piece in pieces] == [note.name for note in notes]
    for bucket in buckets:
        assert bucket.size % 16 == 0 and all(piece.start % 16 == 0 for piece in bucket.pieces)
        ends = [0, *(piece.stop for piece in bucket.pieces)]
        assert all(end <= piece.start for end, piece in zip(ends, bucket.pieces, strict=False))
        assert ends[-1] <= bucket.size and (ends[-1] <= most or len(bucket.pieces) == 1)


@pytest.mark.parametrize("staged", [False, True], ids=["host-memory", "through-a-stage"])
def test_several_versions_arrive_bit_for_bit_through_one_group(staged: bool) -> None:
    """On GPUs NCCL sends the buckets through a stage; here the device of the stage is the CPU."""
    rendezvous = Rendezvous("127.0.0.1")
    stage = Stage("cpu") if staged else None
    lead, *others = orders(rendezvous, "all", 4)
    receivers = [Receiver("127.0.0.1") for _ in others]
    group: Any = None
    before: list[torch.Tensor] = []
    with ThreadPoolExecutor(4) as threads:
        for version in range(3):
            named = weights(version)
            packed = PackedWeights(named, bucket_bytes=128, before=before)
            assert len(packed.buckets) > 4
            receiving = [
                threads.submit(r.receive, StreamOrder(order, packed.bucket_bytes, packed.notes, staged))
                for r, order in zip(receivers, others, strict=True)
            ]
            group = group or rendezvous.join(lead)
            send(group, packed, stage)
            for received in receiving:
                assert bits(received.result(30)) == bits(named)
            assert before == [] or packed.flats[0].data_ptr() == before[0].data_ptr(), (
                "the memory of the last version was not reused"
            )
            before = packed.flats


def test_packed_weights_keep_their_bytes_when_the_tensors_change_afterwards() -> None:
    named = weights()
    expected = bits(named)
    packed = PackedWeights(named, bucket_bytes=256)
    packed.complete()
    for _, tensor in named:
        tensor.zero_()
    assert bits(packed.tensors()) == expected


def test_a_damaged_bucket_is_refused() -> None:
    rendezvous = Rendezvous("127.0.0.1")
    lead, other = orders(rendezvous, "damaged", 2)
    packed = PackedWeights(weights(), bucket_bytes=512)
    packed.complete()
    packed.flats[1][3] ^= 1
    with ThreadPoolExecutor(1) as threads:
        receiving = threads.submit(
            Receiver("127.0.0.1").receive, StreamOrder(other, packed.bucket_bytes, packed.notes)
        )
        send(rendezvous.join(lead), packed)
        with pytest.raises(TransferBroken, match=r"bucket 1 .* damaged"):
            receiving.result(30)


def test_an_absent_or_silent_member_ends_the_transfer_after_the_stall_timeout() -> None:
    rendezvous = Rendezvous("127.0.0.1")
    lead, other = orders(rendezvous, "absent", 2, stall_s=1.0)
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        rendezvous.join(lead)
    packed = PackedWeights(weights(), bucket_bytes=512)
    receiver = Receiver("127.0.0.1")
    with ThreadPoolExecutor(1) as threads:
        lead, other = orders(rendezvous, "silent", 2, stall_s=1.0)
        receiving = threads.submit(receiver.receive, StreamOrder(other, packed.bucket_bytes, packed.notes))
        group = rendezvous.join(lead)
        with pytest.raises(TransferBroken, match="did not arrive whole"):
            receiving.result(20)
        assert time.monotonic() - began < 20
        del group
        lead, other = orders(rendezvous, "again", 2)
        receiving = threads.submit(receiver.receive, StreamOrder(other, packed.bucket_bytes, packed.notes))
        send(rendezvous.join(lead), packed)
        assert bits(receiving.result(20)) == bits(weights()), (
            "a receiver that gave up cannot join the next group"
        )
