"""Placement: assigns each process a device of a pool before anything is started. Arithmetic only.

    pools    train: 1 node × 4 GPUs        teachers: 2 nodes × 4 GPUs
    claims   student, 4 units of 1         teacher-math, 3 units of 2
    seats    teacher-math/2, rank 1 ─> pool teachers, node 1, GPU 1

A claim is a role's request: a number of units (ranks of a student, engines, replicas, workers), each of a
number of devices. The devices of one unit communicate all the time, so a unit stays within a node or takes
whole nodes. Claims that `may_share` get devices of their own if there are enough and share devices if not. No
other claim shares. A seat is one device of one unit. Each backend places its processes by their seats: local
processes by device index, Ray by bundles.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import groupby

from understudy.errors import ClusterError
from understudy.observability.report import many


class DeviceKind(StrEnum):
    GPU = "GPU"
    CPU = "CPU"


@dataclass(frozen=True, slots=True)
class Pool:
    """Machines of one kind: so many nodes with so many devices each."""

    name: str
    nodes: int
    gpus_per_node: int = 0
    cpus_per_node: int = 0

    def per_node(self, kind: DeviceKind) -> int:
        return self.gpus_per_node if kind is DeviceKind.GPU else self.cpus_per_node

    def shape(self, kind: DeviceKind) -> str:
        """For messages: `2 nodes × 4 GPUs`."""
        count = self.per_node(kind)
        return f"{many(self.nodes, 'node')} × {many(count, kind.value)}"


@dataclass(frozen=True, slots=True)
class Claim:
    """What a role requests of a pool."""

    role: str
    """`student`, `rollout`, `workers`, `critic`, `teacher-NAME`."""
    pool: str
    units: int
    """Ranks, engines, replicas or workers."""
    world_size: int = 1
    """Devices of one unit, within a node or over whole nodes."""
    kind: DeviceKind = DeviceKind.GPU
    leads: bool = False
    """Placed first, on the first devices: the launching process itself is one of the units."""
    may_share: bool = False
    """Its units take one device each and share devices if there are too few for all."""

    @property
    def devices(self) -> int:
        return self.units * self.world_size


@dataclass(frozen=True, slots=True)
class Seat:
    """One device of one unit."""

    role: str
    unit: int
    rank: int
    """Within its unit."""
    pool: str
    kind: DeviceKind
    node: int
    """Within its pool."""
    device: int
    """Within its node, counted over the pool's devices of this kind."""


@dataclass(frozen=True)
class Placement:
    """The pools and every seat assigned so far. Immutable: changes return a new one."""

    pools: Mapping[str, Pool]
    seats: tuple[Seat, ...] = ()

    def of(self, role: str, unit: int) -> list[Seat]:
        """One unit's seats, by rank."""
        mine = [seat for seat in self.seats if seat.role == role and seat.unit == unit]
        return sorted(mine, key=lambda seat: seat.rank)

    def free(self, pool: str, kind: DeviceKind, node: int) -> list[int]:
        taken = {
            seat.device for seat in self.seats if (seat.pool, seat.kind, seat.node) == (pool, kind, node)
        }
        return [device for device in range(self.pools[pool].per_node(kind)) if device not in taken]

    def shared(self) -> list[list[Seat]]:
        """The seats of each GPU that has more than one, in the order of the pools."""
        sits: dict[tuple[str, int, int], list[Seat]] = {}
        for seat in self.seats:
            if seat.kind is DeviceKind.GPU:
                sits.setdefault((seat.pool, seat.node, seat.device), []).append(seat)
        order = list(self.pools)
        ordered = sorted(sits.items(), key=lambda item: (order.index(item[0][0]), *item[0][1:]))
        return [seats for _, seats in ordered if len(seats) > 1]

    def with_unit(self, claim: Claim, unit: int) -> Placement:
        """Adds one unit of a role to those that are placed: for a replica that joins later.

        Raises if no device is free.
        """
        seats = _seats_for(self, claim, unit)
        if seats is None:
            raise ClusterError(
                f"no room for {claim.role}/{unit}: it wants {many(claim.world_size, claim.kind.value)} of one node "
                f"of pool {claim.pool}\n{self.draw(claim.pool, claim.kind)}"
            )
        return replace(self, seats=(*self.seats, *seats))

    def without_unit(self, role: str, unit: int) -> Placement:
        left = tuple(seat for seat in self.seats if (seat.role, seat.unit) != (role, unit))
        return replace(self, seats=left)

    def draw(self, pool: str, kind: DeviceKind) -> str:
        """One line per node, neighbours of one unit drawn together."""
        taken: dict[tuple[int, int], str] = {}
        for seat in self.seats:
            if (seat.pool, seat.kind) == (pool, kind):
                place, label = (seat.node, seat.device), f"{seat.role}/{seat.unit}"
                taken[place] = f"{taken[place]} + {label}" if place in taken else label
        found = self.pools[pool]
        lines = [f"pool {pool}: {found.shape(kind)}"]
        for node in range(found.nodes):
            who = [(device, taken.get((node, device), "free")) for device in range(found.per_node(kind))]
            cells = []
            for label, run in groupby(who, key=lambda pair: pair[1]):
                devices = [device for device, _ in run]
                span = str(devices[0]) if len(devices) == 1 else f"{devices[0]}-{devices[-1]}"
                cells.append(f"{span} {label}")
            lines.append(f"  node {node} │ {' │ '.join(cells)} │")
        return "\n".join(lines)

    def drawing(self) -> str:
        """Every pool, every kind of device it has."""
        return "\n".join(
            self.draw(pool.name, kind)
            for pool in self.pools.values()
            for kind in DeviceKind
            if pool.per_node(kind)
        )


def place(pools: Iterable[Pool], claims: Sequence[Claim], seated: Iterable[Seat] = ()) -> Placement:
    """Seats for every claim; raises `ClusterError` with every problem and a drawing of the pool.

    Order: leaders, seats chosen by hand (`seated`), claims that share with no other claim (wide units first), claims that may
    share. Seats chosen by hand may be on any device, a leader's included; every other unit avoids them while a device is free.
    """
    placement = Placement({pool.name: pool for pool in pools})
    problems = _misfits(placement.pools, claims)
    if problems:
        raise ClusterError("\n".join(problems))
    by_width = sorted(claims, key=lambda claim: -claim.world_size)
    for claim in (claim for claim in by_width if claim.leads):
        placement = _with_claim(placement, claim)
    placement = replace(placement, seats=(*placement.seats, *seated))
    first = placement.seats  # of leaders, and chosen by hand: shared only if no device is free
    for claim in (claim for claim in by_width if not claim.leads and not claim.may_share):
        placement = _with_claim(placement, claim)
    for pool in placement.pools.values():
        for kind in DeviceKind:
            flexible = [c for c in claims if c.may_share and (c.pool, c.kind) == (pool.name, kind)]
            placement = _spread(placement, pool, kind, flexible, first)
    return placement


def _with_claim(placement: Placement, claim: Claim) -> Placement:
    for unit in range(claim.units):
        seats = _seats_for(placement, claim, unit)
        if seats is None:
            raise ClusterError(
                f"{claim.role}/{unit} wants {many(claim.world_size, claim.kind.value)} of one node, and no node of pool "
                f"{claim.pool} has them left, though the sum would fit: units may not cross nodes\n"
                f"{placement.draw(claim.pool, claim.kind)}\nchange the world size, or give the pool another node"
            )
        placement = replace(placement, seats=(*placement.seats, *seats))
    return placement


def _spread(
    placement: Placement, pool: Pool, kind: DeviceKind, claims: Sequence[Claim], first: Sequence[Seat]
) -> Placement:
    """Places units that may share: one device each if enough are free, else evenly over the free ones.

    If no device is free, over the devices of leaders and of seats chosen by hand. These are `first`, the
    seats with which the placement begins. Later units share first, replicas of one role last.
    """
    free = [(node, device) for node in range(pool.nodes) for device in placement.free(pool.name, kind, node)]
    units = [(claim.role, unit) for claim in claims for unit in range(claim.units)]
    if len(units) > len(free):
        units.sort(key=lambda one: one[1])
        taken = {(seat.node, seat.device) for seat in first if (seat.pool, seat.kind) == (pool.name, kind)}
        own = {
            (seat.node, seat.device)
            for seat in placement.seats[len(first) :]
            if (seat.pool, seat.kind) == (pool.name, kind)
        }
        free = free or sorted(taken - own)
        if not free:
            raise ClusterError(
                f"no {kind} of pool {pool.name} is left for {', '.join(f'{role}/{unit}' for role, unit in units)}\n"
                f"{placement.draw(pool.name, kind)}\nuse fewer replicas, a smaller world size, or a larger pool"
            )
    least, more = divmod(len(units), len(free)) if len(units) > len(free) else (1, 0)
    seats, rest = [], units
    for place, (node, device) in enumerate(free):
        count = least + (place >= len(free) - more)
        seats += [Seat(role, unit, 0, pool.name, kind, node, device) for role, unit in rest[:count]]
        rest = rest[count:]
    return replace(placement, seats=(*placement.seats, *seats))


def _misfits(pools: Mapping[str, Pool], claims: Sequence[Claim]) -> list[str]:
    """Problems no placement can solve: no such pool, no units, widths that end inside a node, sums that do
    not fit."""
    problems = []
    for claim in claims:
        if claim.pool not in pools:
            problems.append(
                f"{claim.role} is to sit in pool {claim.pool!r}; pools are {', '.join(pools) or 'none'}"
            )
        elif claim.units < 1 or claim.world_size < 1:
            problems.append(
                f"{claim.role}: {claim.units} units of {claim.world_size} devices; both must be at least 1"
            )
        else:
            problems += _width(pools[claim.pool], claim)
        if claim.may_share and claim.world_size != 1:
            problems.append(f"{claim.role}: a unit of {claim.world_size} devices shares none of them")
    if problems:
        return problems
    for pool in pools.values():
        for kind in DeviceKind:
            problems += _sum(
                pool, kind, [c for c in claims if (c.pool, c.kind) == (pool.name, kind) and not c.may_share]
            )
    return problems


def _width(pool: Pool, claim: Claim) -> list[str]:
    width, per_node = claim.world_size, pool.per_node(claim.kind)
    if not per_node:
        return [f"{claim.role} wants {claim.kind}s, and pool {pool.name} has none"]
    if width <= per_node or width % per_node == 0:
        return []
    drawn = " │ ".join(
        f"node {node}: {min(per_node, width - node * per_node)} of {per_node}"
        for node in range(-(-width // per_node))
    )
    return [
        f"{claim.role}: a unit of {width} {claim.kind}s would end inside a node of pool {pool.name} ({drawn}); "
        f"use at most {per_node}, or a multiple of it"
    ]


def _sum(pool: Pool, kind: DeviceKind, claims: Sequence[Claim]) -> list[str]:
    have, wanted = pool.nodes * pool.per_node(kind), sum(claim.devices for claim in claims)
    if wanted <= have:
        return []
    parts = " + ".join(f"{claim.role} {claim.units} × {claim.world_size}" for claim in claims)
    return [
        f"pool {pool.name} has {pool.shape(kind)} = {have}; {parts} = {wanted}: {wanted - have} too many. "
        "Use fewer replicas, a smaller world size, or a larger pool"
    ]


def _seats_for(placement: Placement, claim: Claim, unit: int) -> list[Seat] | None:
    """The first free seats for one unit: within a node, or over consecutive nodes that are wholly free; else
    None."""
    pool = placement.pools[claim.pool]
    per_node = pool.per_node(claim.kind)
    free = [placement.free(claim.pool, claim.kind, node) for node in range(pool.nodes)]
    if claim.world_size <= per_node:
        places = next(
            (
                [(node, d) for d in free[node][: claim.world_size]]
                for node in range(pool.nodes)
                if len(free[node]) >= claim.world_size
            ),
            None,
        )
    else:
        span = claim.world_size // per_node
        starts = range(pool.nodes - span + 1)
        first = next(
            (s for s in starts if all(len(free[node]) == per_node for node in range(s, s + span))), None
        )
        places = None if first is None else [(n, d) for n in range(first, first + span) for d in free[n]]
    if places is None:
        return None
    return [
        Seat(claim.role, unit, rank, claim.pool, claim.kind, node, device)
        for rank, (node, device) in enumerate(places)
    ]
