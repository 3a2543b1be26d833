"""Which library broadcasts the weights (NCCL or Gloo), given the GPUs that members report."""

import pytest

from understudy.weights.broadcast import GroupBackend, Member, choose_backend, gpu_id

TRAINER = Member("the trainer", "GPU-a")


@pytest.mark.parametrize(
    ("members", "backend", "note"),
    [
        ([TRAINER, Member("replica-0", "GPU-b")], GroupBackend.NCCL, None),
        ([TRAINER, *(Member(f"replica-{i}", f"GPU-{i}") for i in range(7))], GroupBackend.NCCL, None),
        ([Member("the trainer"), Member("replica-0")], GroupBackend.GLOO, None),
        (
            [Member("the trainer"), Member("replica-0", "GPU-b")],
            GroupBackend.GLOO,
            "the trainer of 2 members",
        ),
        (
            [TRAINER, Member("replica-0", "GPU-b"), Member("replica-1"), Member("replica-2")],
            GroupBackend.GLOO,
            "replica-1, replica-2 of 4 members have no GPU",
        ),
        (
            [TRAINER, Member("replica-0", "GPU-a")],
            GroupBackend.GLOO,
            "the trainer and replica-0 share GPU GPU-a",
        ),
        (
            [TRAINER, Member("replica-0", "GPU-b"), Member("replica-1", "GPU-b")],
            GroupBackend.GLOO,
            "replica-0 and replica-1 share",
        ),
    ],
)
def test_nccl_is_chosen_only_if_every_member_has_its_own_gpu(
    members: list[Member], backend: GroupBackend, note: str | None
) -> None:
    choice = choose_backend(members)
    assert choice.backend is backend
    assert (choice.note is None) if note is None else (note in str(choice.note))


def test_a_cpu_device_has_no_gpu_id() -> None:
    assert gpu_id("cpu") is None
