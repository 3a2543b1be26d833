"""Placement of roles on the devices of pools: which device each gets, the drawing, and what is refused."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.cluster.devices import visible_gpus
from understudy.cluster.placement import Claim, DeviceKind, Placement, Pool, Seat, place
from understudy.errors import ClusterError

TWO_NODES = Pool("teachers", 2, 4)


def places(placement: Placement, role: str, unit: int) -> list[tuple[int, int]]:
    return [(seat.node, seat.device) for seat in placement.of(role, unit)]


def test_the_devices_of_a_unit_are_on_one_node() -> None:
    placement = place(
        [TWO_NODES], [Claim("teacher-a", "teachers", 2, 3), Claim("teacher-b", "teachers", 2, 1)]
    )
    assert places(placement, "teacher-a", 0) == [(0, 0), (0, 1), (0, 2)]
    assert places(placement, "teacher-a", 1) == [(1, 0), (1, 1), (1, 2)]
    assert places(placement, "teacher-b", 0) == [(0, 3)] and places(placement, "teacher-b", 1) == [(1, 3)]


def test_a_unit_wider_than_a_node_takes_whole_nodes() -> None:
    pool = Pool("big", 4, 2)
    placement = place([pool], [Claim("small", "big", 3, 1), Claim("wide", "big", 1, 4)])
    assert places(placement, "wide", 0) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [places(placement, "small", unit) for unit in range(3)] == [[(2, 0)], [(2, 1)], [(3, 0)]]


def test_the_claim_that_leads_gets_the_first_devices() -> None:
    placement = place([Pool("m", 1, 4)], [Claim("wide", "m", 1, 2), Claim("student", "m", 2, leads=True)])
    assert [places(placement, "student", rank) for rank in range(2)] == [[(0, 0)], [(0, 1)]]


def test_the_drawing_shows_devices_that_are_free() -> None:
    placement = place([TWO_NODES], [Claim("math", "teachers", 2, 2), Claim("code", "teachers", 1, 1)])
    assert placement.draw("teachers", DeviceKind.GPU) == (
        "pool teachers: 2 nodes × 4 GPUs\n"
        "  node 0 │ 0-1 math/0 │ 2-3 math/1 │\n"
        "  node 1 │ 0 code/0 │ 1-3 free │"
    )


def test_the_error_about_too_many_claimed_devices_shows_the_sum() -> None:
    claims = [Claim("math", "teachers", 2, 4), Claim("code", "teachers", 1, 2)]
    with pytest.raises(
        ClusterError,
        match=r"pool teachers has 2 nodes × 4 GPUs = 8; math 2 × 4 \+ code 1 × 2 = 10: 2 too many",
    ):
        place([TWO_NODES], claims)


def test_a_unit_that_fits_no_single_node_is_refused_even_if_the_sum_of_devices_fits() -> None:
    with pytest.raises(ClusterError) as caught:
        place(
            [TWO_NODES],
            [Claim("math", "teachers", 3, 2), Claim("big", "teachers", 2, 1), Claim("x", "teachers", 1, 0)],
        )
    assert "both must be at least 1" in str(caught.value)
    with pytest.raises(ClusterError) as caught:
        place([Pool("p", 3, 4)], [Claim("three", "p", 4, 3)])
    message = str(caught.value)
    assert "three/3 wants 3 GPUs of one node" in message and "though the sum would fit" in message
    assert "  node 2 │ 0-2 three/2 │ 3 free │" in message


def test_a_wide_unit_that_would_end_inside_a_node_is_refused_with_a_drawing() -> None:
    with pytest.raises(
        ClusterError, match=r"node 0: 4 of 4 │ node 1: 2 of 4\); use at most 4, or a multiple"
    ):
        place([TWO_NODES], [Claim("math", "teachers", 1, 6)])


def test_unknown_pools_empty_claims_and_missing_device_kinds_are_reported_together() -> None:
    claims = [
        Claim("a", "nowhere", 1),
        Claim("b", "teachers", 0),
        Claim("c", "teachers", 1, 1, DeviceKind.CPU),
    ]
    with pytest.raises(ClusterError) as caught:
        place([TWO_NODES], claims)
    lines = str(caught.value).splitlines()
    assert len(lines) == 3 and "'nowhere'; pools are teachers" in lines[0] and "at least 1" in lines[1]
    assert "wants CPUs, and pool teachers has none" in lines[2]


def test_gpus_and_cpus_of_a_pool_are_counted_separately() -> None:
    pool = Pool("all", 1, gpus_per_node=1, cpus_per_node=4)
    placement = place([pool], [Claim("student", "all", 1), Claim("workers", "all", 4, 1, DeviceKind.CPU)])
    assert "1 node × 1 GPU\n  node 0 │ 0 student/0 │" in placement.drawing()
    assert "3 workers/3" in placement.drawing()


def test_a_replica_gets_the_devices_of_one_that_left() -> None:
    claim = Claim("math", "teachers", 3, 2)
    placement = place([TWO_NODES], [claim])
    placement = placement.with_unit(claim, 3)
    assert places(placement, "math", 3) == [(1, 2), (1, 3)]
    with pytest.raises(ClusterError, match="no room for math/4"):
        placement.with_unit(claim, 4)
    placement = placement.without_unit("math", 0).with_unit(claim, 4)
    assert places(placement, "math", 4) == [(0, 0), (0, 1)]


def test_seats_given_explicitly_may_share_a_device() -> None:
    chosen = [Seat(role, 0, 0, "m", DeviceKind.GPU, 0, 0) for role in ("student", "teacher-a")]
    placement = place([Pool("m", 1, 2)], [Claim("teacher-b", "m", 1)], chosen)
    assert "0 student/0 + teacher-a/0 │ 1 teacher-b/0" in placement.drawing()


@given(
    nodes=st.integers(1, 4),
    per_node=st.integers(1, 8),
    wanted=st.lists(st.tuples(st.integers(1, 4), st.sampled_from([1, 2, 3, 4, 8])), min_size=1, max_size=4),
)
def test_a_placement_uses_each_device_once_and_as_few_nodes_per_unit_as_possible(
    nodes: int, per_node: int, wanted: list[tuple[int, int]]
) -> None:
    claims = [Claim(f"r{i}", "p", units, width) for i, (units, width) in enumerate(wanted)]
    try:
        placement = place([Pool("p", nodes, per_node)], claims)
    except ClusterError:
        return
    used_devices = [(seat.node, seat.device) for seat in placement.seats]
    assert len(used_devices) == len(set(used_devices)) == sum(claim.devices for claim in claims)
    assert all(node < nodes and device < per_node for node, device in used_devices)
    for claim in claims:
        for unit in range(claim.units):
            seats = placement.of(claim.role, unit)
            assert [seat.rank for seat in seats] == list(range(claim.world_size))
            touched = {seat.node for seat in seats}
            assert len(touched) == max(1, claim.world_size // per_node)
            for other in placement.seats:  # a whole node has one role
                if len(touched) > 1 and other.node in touched:
                    assert (other.role, other.unit) == (claim.role, unit)


@given(st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=8))
def test_claims_whose_widths_are_powers_of_two_fit_whenever_their_sum_does(widths: list[int]) -> None:
    claims = [Claim(f"r{i}", "p", 1, width) for i, width in enumerate(widths)]
    nodes = -(-sum(widths) // 8)
    assert len(place([Pool("p", nodes, 8)], claims).seats) == sum(widths)


def test_visible_gpus_are_found_from_device_files_and_cuda_visible_devices(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == ["0", "1"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "2, 5"}, tmp_path) == ["2", "5"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == []
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "1,-1,2"}, tmp_path) == ["1"]
