"""Placement of processes on a Ray cluster, and the error when they do not fit. Computed without Ray."""

import pytest

from understudy.cluster.ray_layout import (
    Bundle,
    GroupRequest,
    NodeFacts,
    RayLayout,
    Spread,
    UnitBundle,
    misfit,
    unit_of,
)


def node(
    name: str, cpus: float, gpus: float = 0, free: float | None = None, trainers: bool = False
) -> NodeFacts:
    return NodeFacts(name, Bundle(cpus, gpus), Bundle(cpus if free is None else free, gpus), trainers)


def request(count: int, bundle: Bundle, spread: Spread = Spread.LOOSE, leads: bool = False) -> GroupRequest:
    return GroupRequest("teachers", (bundle,) * count, spread, leads)


@pytest.mark.parametrize(
    ("requests", "nodes", "fits"),
    [
        ([request(3, Bundle(1))], [node("a", 2), node("b", 1)], True),
        ([request(3, Bundle(1), Spread.STRICT)], [node("a", 2), node("b", 1)], False),
        ([request(2, Bundle(1), Spread.STRICT)], [node("a", 2), node("b", 1)], True),
        ([request(1, Bundle(2))], [node("a", 1), node("b", 1)], False),
        ([request(1, Bundle(0, 2))], [node("a", 8, 1), node("b", 8, 1)], False),
        ([request(1, Bundle(1)), request(1, Bundle(2))], [node("a", 2), node("b", 1)], True),
        ([request(1, Bundle(1))], [node("a", 4, free=0)], False),
        (
            [request(2, Bundle(1), Spread.STRICT, leads=True)],
            [node("a", 1), node("b", 1, trainers=True)],
            True,
        ),
        (
            [request(2, Bundle(2), Spread.STRICT, leads=True)],
            [node("a", 2), node("b", 1, trainers=True)],
            False,
        ),
        ([], [], True),
    ],
)
def test_misfit_is_none_if_and_only_if_the_requests_fit_the_nodes(
    requests: list[GroupRequest], nodes: list[NodeFacts], fits: bool
) -> None:
    assert (misfit(requests, nodes) is None) == fits


def test_a_misfit_names_the_request_the_reason_and_the_resources_of_each_machine() -> None:
    nodes = [node("10.0.0.1/abc", 4, free=1, trainers=True), node("10.0.0.2/def", 2, 1)]
    message = misfit([request(2, Bundle(4))], nodes)
    assert message is not None and "teachers wants 2 × (4 CPU); room was found for 0" in message
    assert "the machines that are large enough are taken" in message
    assert "10.0.0.1/abc │ has 4 CPU │ free 1 CPU │ the trainer is here" in message
    assert "10.0.0.2/def │ has 2 CPU + 1 GPU │ free 2 CPU + 1 GPU" in message
    assert "no machine is that large" in str(misfit([request(1, Bundle(9))], nodes))
    assert "a machine of its own" in str(misfit([request(3, Bundle(1), Spread.STRICT)], nodes))
    assert "trainer's own machine" in str(misfit([request(1, Bundle(2), Spread.STRICT, leads=True)], nodes))


def test_a_group_request_as_text() -> None:
    assert str(request(2, Bundle(1, 2))) == "teachers: 2 × (1 CPU + 2 GPU) on different machines if there are"
    assert str(request(2, Bundle(1), Spread.STRICT, leads=True)).endswith(
        "on machines of their own, the first the trainer's own"
    )


def test_ranks_of_a_unit_share_its_bundle_and_other_processes_have_none() -> None:
    unit_bundle = UnitBundle("teacher-math", 1, Bundle(0, 2))
    layout = RayLayout({}, {"teacher-math-1": unit_bundle})
    assert (
        layout.bundle_of("teacher-math-1") is unit_bundle
        and layout.bundle_of("teacher-math-1-rank1") is unit_bundle
    )
    assert layout.bundle_of("teacher-math-0") is None and layout.bundle_of("engine-0") is None
    assert unit_of("rank-1") == "rank-1", "a rank of the student is a unit of its own"
