"""Placement on a Ray cluster: seats become placement groups of bundles. Arithmetic only.

    pool teachers: 2 nodes × 4 GPUs     ─>  one group, STRICT_SPREAD: a bundle per node, each on a machine of its own
    teacher-math, 3 replicas, no pool   ─>  one group, SPREAD: a bundle per replica, on different machines if there are
    teacher-math-1, its ranks           ─>  one bundle: the ranks of a unit share a bundle and so a machine

A process without a bundle here is started on the trainer's machine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

_RANK = re.compile(r"-rank\d+$")


class Spread(StrEnum):
    """The placement strategies of Ray that we use."""

    STRICT = "STRICT_SPREAD"
    """Every bundle on a machine of its own, or no bundle at all."""
    LOOSE = "SPREAD"
    """On different machines where there are enough."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """Devices of one machine, reserved together."""

    cpus: float
    gpus: float = 0.0

    def resources(self) -> dict[str, float]:
        return {name: count for name, count in (("CPU", self.cpus), ("GPU", self.gpus)) if count}

    def __str__(self) -> str:
        return " + ".join(f"{count:g} {name}" for name, count in self.resources().items()) or "nothing"


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """Bundles that are reserved together or not at all."""

    name: str
    bundles: tuple[Bundle, ...]
    spread: Spread
    leads: bool = False
    """The first bundle is on the trainer's machine."""

    def __str__(self) -> str:
        first = ", the first the trainer's own" if self.leads else ""
        machines = (
            "machines of their own" if self.spread is Spread.STRICT else "different machines if there are"
        )
        return f"{self.name}: {len(self.bundles)} × ({self.bundles[0]}) on {machines}{first}"


@dataclass(frozen=True, slots=True)
class UnitBundle:
    """The bundle that the processes of one unit run in, and the share of it they take."""

    group: str
    bundle: int
    share: Bundle


@dataclass(frozen=True)
class RayLayout:
    """The placement groups to reserve and the bundle of each unit."""

    groups: Mapping[str, GroupRequest] = field(default_factory=dict)
    units: Mapping[str, UnitBundle] = field(default_factory=dict)
    """By unit: `teacher-math-0`."""

    def bundle_of(self, process: str) -> UnitBundle | None:
        return self.units.get(unit_of(process))


def unit_of(process: str) -> str:
    """The unit a process belongs to: ranks of one replica share it.

    >>> unit_of("teacher-math-0-rank1")
    'teacher-math-0'
    """
    return _RANK.sub("", process)


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """A machine of the cluster: its devices and how many are free."""

    name: str
    total: Bundle
    free: Bundle
    is_trainers: bool = False
    node_id: str = ""
    """Ray's id of the machine."""


def misfit(requests: Sequence[GroupRequest], nodes: Sequence[NodeFacts]) -> str | None:
    """Why these groups do not fit now, with a drawing of the cluster; None if they fit.

    Bundles are placed largest first on free devices, each group by its own spread.
    """
    left = {node.name: node.free for node in nodes}
    own = [node.name for node in nodes if node.is_trainers]
    for request in sorted(
        requests, key=lambda request: (request.leads, max(map(_weight, request.bundles))), reverse=True
    ):
        used: set[str] = set()
        bundles = (
            list(request.bundles) if request.leads else sorted(request.bundles, key=_weight, reverse=True)
        )
        for place, bundle in enumerate(bundles):
            among = own if request.leads and not place else list(left)
            fitting = [name for name in among if _fits(bundle, left[name])]
            fresh = [name for name in fitting if name not in used]
            choice = fresh or ([] if request.spread is Spread.STRICT else fitting)
            if not choice:
                return _explain(request, bundle, place, fitting, nodes)
            chosen = max(choice, key=lambda name: _weight(left[name]))
            used.add(chosen)
            free = left[chosen]
            left[chosen] = Bundle(free.cpus - bundle.cpus, free.gpus - bundle.gpus)
    return None


def _explain(
    request: GroupRequest, bundle: Bundle, place: int, fitting: Sequence[str], nodes: Sequence[NodeFacts]
) -> str:
    if any(_fits(bundle, node.total) for node in nodes):
        why = "the machines that are large enough are taken"
    else:
        why = "no machine is that large"
    if request.leads and not place:
        why = "the first belongs on the trainer's own machine, which has not that much left"
    elif fitting:
        why = "each wants a machine of its own, and there are too few"
    return (
        f"{request.name} wants {len(request.bundles)} × ({bundle}); room was found for {place}: {why}\n{draw(nodes)}\n"
        "add machines (`ray start --address=…`), ask for fewer replicas or threads, or wait until others are done"
    )


def draw(nodes: Sequence[NodeFacts]) -> str:
    """One line per machine."""
    lines = [f"the cluster: {len(nodes)} machine{'' if len(nodes) == 1 else 's'}"]
    lines += [
        f"  {node.name} │ has {node.total} │ free {node.free}{' │ the trainer is here' if node.is_trainers else ''}"
        for node in nodes
    ]
    return "\n".join(lines)


def _fits(bundle: Bundle, free: Bundle) -> bool:
    return bundle.cpus <= free.cpus + 1e-6 and bundle.gpus <= free.gpus + 1e-6


def _weight(bundle: Bundle) -> tuple[float, float]:
    return bundle.gpus, bundle.cpus
