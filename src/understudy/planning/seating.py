"""Assigns a recipe's roles to GPUs (and CPUs) of this machine: claims on pools, and the seats they get.

    [cluster.pools]        each pool takes a slice of the machine's GPUs, in the order written
    machine                the remaining GPUs: the student, rollout engines, a critic in its own process and
                           `standalone` teachers, each on its own GPU

`external` teachers are remote and have no seat. `device = "cuda:N"` and `rollout.devices` are manual seats:
other roles avoid them while a GPU is free. If there are too few GPUs, engine processes and single-GPU teacher
replicas share the GPUs that the other roles leave (placement.py); on a single GPU all roles share it.
`Seating.shared` lists the sharing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from understudy.cluster.placement import Claim, DeviceKind, Placement, Pool, Seat, place
from understudy.config import Recipe, RolloutConfig, TeacherConfig
from understudy.config.devices import asks_for_gpu
from understudy.errors import ClusterError

MACHINE = "machine"
"""The pool of the GPUs that are in none of the recipe's pools."""
STUDENT: Final = "student"
ROLLOUT: Final = "rollout"
WORKERS: Final = "workers"
CRITIC: Final = "critic"


_WAYS_OUT = {
    ROLLOUT: "set rollout.processes (or rollout.engine = 'vllm'), or take it out",
    WORKERS: "set rollout.workers, or take it out",
}


_ANY_DEVICE = "set 'cpu', or 'auto', which takes a GPU if there is one"


def teacher_role(name: str) -> str:
    return f"teacher-{name}"


def critic_sits_apart(recipe: Recipe) -> bool:
    """Whether the recipe has a critic in its own process."""
    asked = recipe.critic is not None and recipe.critic.process
    return recipe.loss.advantage == "gae" and (asked or CRITIC in recipe.cluster.roles)


def critic_device(recipe: Recipe) -> str:
    """The device of a critic in its own process, as recipes write it."""
    chosen = recipe.critic.device if recipe.critic is not None else None
    return chosen or ("cpu" if recipe.student.device == "cpu" else "auto")


@dataclass(frozen=True)
class Seating:
    """The result of `seat`."""

    placement: Placement
    claims: Mapping[str, Claim]
    """By role; roles with manual seats have none."""
    first_gpu: Mapping[str, int]
    """By pool: the index of its first GPU on this machine."""

    def gpus(self, role: str, unit: int) -> list[int]:
        """This machine's GPU indexes for one unit, by rank; empty if it has no GPU."""
        return [
            self.first_gpu[seat.pool] + seat.device
            for seat in self.placement.of(role, unit)
            if seat.kind is DeviceKind.GPU
        ]

    def shared(self) -> str | None:
        """Which processes share a GPU, in one line; None if none does."""
        cells = [
            f"GPU {self.first_gpu[seats[0].pool] + seats[0].device}: "
            + " + ".join(f"{one.role}/{one.unit}" for one in seats)
            for seats in self.placement.shared()
        ]
        if not cells:
            return None
        return (
            f"shared, each process with its whole model in memory: {'; '.join(cells)}. For GPUs of their own use more GPUs or fewer "
            "replicas; to choose, set `device` and rollout.devices"
        )


class Seats:
    """The seats of a running run, in which replicas are added and removed."""

    def __init__(self, seating: Seating, gpu_names: Sequence[str]) -> None:
        self.seating = seating
        self._gpu_names = gpu_names
        """The name of each GPU in CUDA_VISIBLE_DEVICES."""

    def take(self, role: str, unit: int) -> list[str]:
        """Names of the GPUs of one unit, by rank. A new unit gets a free seat; raises `ClusterError` if there
        is none."""
        claim = self.seating.claims.get(role)
        if claim is not None and not self.seating.placement.of(role, unit):
            self.seating = replace(self.seating, placement=self.seating.placement.with_unit(claim, unit))
        return [self._gpu_names[index] for index in self.seating.gpus(role, unit)]

    def leave(self, role: str, unit: int) -> None:
        self.seating = replace(self.seating, placement=self.seating.placement.without_unit(role, unit))


def seat(
    recipe: Recipe, gpus: int | None, cpus: int | None = None, gpu_names: Sequence[str] | None = None
) -> Seating:
    """Assigns seats on a machine with this many GPUs (and CPUs, if known); with `gpus=None`, only in the
    recipe's pools.

    `gpu_names` are those of CUDA_VISIBLE_DEVICES, as `rollout.devices` uses them; by default GPUs are
    numbered from 0. Raises `ClusterError` with the layout if a role gets no seat.
    """
    pools = [
        Pool(name, pool.nodes, pool.gpus_per_node, pool.cpus_per_node)
        for name, pool in recipe.cluster.pools.items()
    ]
    used = sum(pool.nodes * pool.gpus_per_node for pool in pools)
    if gpus is not None:
        if used > gpus:
            parts = " + ".join(f"{pool.name} {pool.gpus_per_node}" for pool in pools if pool.gpus_per_node)
            raise ClusterError(f"cluster.pools ask for {used} GPUs ({parts}); this machine has {gpus}")
        _enough_cpus(pools, cpus)
        _enough_gpus(recipe, gpus)
        if gpus:
            pools.append(Pool(MACHINE, 1, gpus - used))
    # The trainer's process uses the machine's first GPUs, so the student's pool comes first.
    pools.sort(key=lambda pool: pool.name != recipe.cluster.roles.get(STUDENT, MACHINE))
    first_gpu, total = {}, 0
    for pool in pools:
        first_gpu[pool.name] = total
        total += pool.nodes * pool.gpus_per_node
    claims = _pool_claims(recipe)
    seated: list[Seat] = []
    in_pools: list[Seat] = []
    if gpus:
        names = gpu_names or [str(index) for index in range(gpus)]
        own, by_hand = _machine(recipe, gpus - used, names, pools)
        claims += own
        seated = [one for one in by_hand if one.pool == MACHINE]
        in_pools = [one for one in by_hand if one.pool != MACHINE]
    try:
        placement = place(pools, claims, seated)
    except ClusterError as error:
        if not any(claim.pool == MACHINE for claim in claims):
            raise
        raise ClusterError(
            f"{error}\n(pool {MACHINE} is what cluster.pools left of this machine. The student's ranks, vLLM servers, a critic in a process "
            "of its own and teachers over several GPUs have GPUs of their own; to share one on purpose, set `device` to 'cuda:N')"
        ) from None
    # A manual seat on a pool's GPU does not reduce the pool: its roles share that GPU.
    placement = replace(placement, seats=(*placement.seats, *in_pools))
    return Seating(placement, {claim.role: claim for claim in claims}, first_gpu)


def rollout_devices(rollout: RolloutConfig, seating: Seating, gpu_names: Sequence[str]) -> Sequence[str]:
    """The GPUs of each rollout engine, in the form of CUDA_VISIBLE_DEVICES: `rollout.devices`, or those that
    the seating chose. Empty if neither names any."""
    claim = seating.claims.get(ROLLOUT)
    if rollout.devices or claim is None or claim.kind is not DeviceKind.GPU:
        return rollout.devices
    return [
        ",".join(gpu_names[index] for index in seating.gpus(ROLLOUT, unit)) for unit in range(claim.units)
    ]


def _enough_cpus(pools: Sequence[Pool], cpus: int | None) -> None:
    wanted = sum(pool.nodes * pool.cpus_per_node for pool in pools)
    if cpus is not None and wanted > cpus:
        parts = " + ".join(f"{pool.name} {pool.cpus_per_node}" for pool in pools if pool.cpus_per_node)
        raise ClusterError(
            f"cluster.pools ask for {wanted} CPUs ({parts}); this machine has {cpus}: lower `cpus_per_node`"
        )


def _enough_gpus(recipe: Recipe, gpus: int) -> None:
    """Raises if a GPU that the recipe names does not exist. Claims on unnamed GPUs are checked by the
    placement."""
    student, ranks = recipe.student.device, recipe.trainer.ranks
    has, problems = f"this machine has {_count(gpus)}", []
    on_gpu = asks_for_gpu(student) or (student == "auto" and gpus > 0)
    shares = student.startswith("cuda:")  # with all other ranks
    if on_gpu and not shares and ranks > max(gpus, 1) and STUDENT not in recipe.cluster.roles:
        problems.append(
            f"trainer.ranks = {ranks} with student.device = {student!r}: each rank takes a GPU of its own, and {has}; lower "
            "trainer.ranks, or set student.device = 'cuda:0' (all ranks share that GPU: slow) or 'cpu'"
        )
    elif on_gpu and not gpus:
        problems.append(f"student.device = {student!r}: {has}; {_ANY_DEVICE}")
    problems += [
        f"teachers.{name}.device = {teacher.device!r}: {has}; {_ANY_DEVICE}"
        for name, teacher in recipe.teachers.items()
        if not gpus and teacher.placement != "external" and asks_for_gpu(teacher.device)
    ]
    if not gpus and critic_sits_apart(recipe) and asks_for_gpu(critic_device(recipe)):
        problems.append(f"critic.device = {critic_device(recipe)!r}: {has}; {_ANY_DEVICE}")
    named = {gpu for devices in recipe.rollout.devices for gpu in devices.split(",")}
    if len(named) > gpus:
        problems.append(
            f"rollout.devices names {_count(len(named))}, and {has}; name those there are, or leave it out"
        )
    if problems:
        raise ClusterError("\n".join(problems))


def _gpus_in_pools(recipe: Recipe) -> None:
    """Raises if a role asks for a GPU and its pool has none; otherwise it would silently get a CPU."""
    pools, roles = recipe.cluster.pools, recipe.cluster.roles
    sits = [("student.device =", recipe.student.device, roles.get(STUDENT))]
    if recipe.rollout.processes:
        sits.append(
            ("rollout.processes sit on student.device, which is", recipe.student.device, roles.get(ROLLOUT))
        )
    sits.append(("critic.device =", critic_device(recipe), roles.get(CRITIC)))
    sits += [
        (f"teachers.{name}.device =", teacher.device, teacher.pool)
        for name, teacher in recipe.teachers.items()
    ]
    problems = [
        f"{key} {device!r}: pool {pool} has no GPUs; give it `gpus_per_node`, or leave `device` out"
        for key, device, pool in sits
        if pool is not None and asks_for_gpu(device) and not pools[pool].gpus_per_node
    ]
    if problems:
        raise ClusterError("\n".join(problems))


def _count(gpus: int) -> str:
    return "no GPU" if not gpus else "1 GPU" if gpus == 1 else f"{gpus} GPUs"


def _pool_claims(recipe: Recipe) -> list[Claim]:
    """Claims of the roles that the recipe assigns to a pool."""
    pools, claims = recipe.cluster.pools, []
    _gpus_in_pools(recipe)
    for role, pool in recipe.cluster.roles.items():
        on_gpu = pools[pool].gpus_per_node > 0
        if role == STUDENT:
            on_gpu = on_gpu and recipe.student.device != "cpu"
            width = 1 if on_gpu else recipe.run.threads or 1
            claims.append(Claim(STUDENT, pool, recipe.trainer.ranks, width, _kind(on_gpu), leads=True))
        elif role == ROLLOUT and (recipe.rollout.starts_servers or recipe.rollout.processes):
            _check_rollout_pool(recipe, pool)
            claims.append(_rollout_claim(recipe, pool, on_gpu))
        elif role == WORKERS and recipe.rollout.workers:
            claims.append(Claim(WORKERS, pool, recipe.rollout.workers, 1, DeviceKind.CPU))
        elif role == CRITIC:
            on_gpu = on_gpu and critic_device(recipe) != "cpu"
            claims.append(Claim(CRITIC, pool, 1, 1 if on_gpu else recipe.run.threads or 1, _kind(on_gpu)))
        else:
            raise ClusterError(
                f"cluster.roles.{role} = {pool!r}: in this recipe `{role}` has no processes of its own, it lives in the "
                f"trainer's and on the student's devices; {_WAYS_OUT[role]}"
            )
    for name, teacher in recipe.teachers.items():
        if teacher.placement == "pool" and teacher.pool:
            on_gpu = teacher.device != "cpu" and pools[teacher.pool].gpus_per_node > 0
            claims.append(_teacher_claim(name, teacher, teacher.pool, on_gpu))
    return claims


def _check_rollout_pool(recipe: Recipe, pool: str) -> None:
    if recipe.rollout.devices:
        raise ClusterError(
            f"cluster.roles.rollout = {pool!r} and rollout.devices both say where the rollout engines sit; take one of them out"
        )


def _kind(on_gpu: bool) -> DeviceKind:
    return DeviceKind.GPU if on_gpu else DeviceKind.CPU


def _rollout_claim(recipe: Recipe, pool: str, on_gpu: bool = True) -> Claim:
    """Each vLLM server holds the whole student, on as many GPUs as its tensor-parallel size. An engine
    process of ours takes one GPU, or as many CPUs as it has threads."""
    if recipe.rollout.processes:
        on_gpu = on_gpu and recipe.student.device != "cpu"
        threads = 1 if on_gpu else recipe.run.threads or 1
        shares = pool == MACHINE
        return Claim(ROLLOUT, pool, recipe.rollout.processes, threads, _kind(on_gpu), may_share=shares)
    width = 1
    parts = [part for word in recipe.rollout.engine_args for part in word.split("=", 1)]
    for word, value in pairwise(parts):
        if word in ("--tensor-parallel-size", "-tp") and value.isdigit():
            width = int(value)
    return Claim(ROLLOUT, pool, recipe.rollout.replicas, width, _kind(on_gpu))


def _teacher_claim(name: str, teacher: TeacherConfig, pool: str, on_gpu: bool) -> Claim:
    """A rank takes one GPU, or as many CPUs as it has threads."""
    width = teacher.tensor_parallel * (1 if on_gpu else teacher.threads)
    return Claim(teacher_role(name), pool, teacher.replicas, width, _kind(on_gpu))


def _machine(
    recipe: Recipe, left: int, names: Sequence[str], pools: Sequence[Pool]
) -> tuple[list[Claim], list[Seat]]:
    """Claims and manual seats of the roles without a pool; `left` GPUs belong to no pool."""
    claims: list[Claim] = []
    seated: list[Seat] = []
    gpus = len(names)
    places = [(pool.name, index) for pool in pools for index in range(pool.gpus_per_node)]

    def at(role: str, unit: int, device: str, rank: int = 0) -> None:
        index = int(device.removeprefix("cuda:")) if device.startswith("cuda:") else 0
        if not 0 <= index < gpus:
            raise ClusterError(f"{role}: device = {device!r}; this machine has {gpus} GPUs")
        pool, place = places[index]
        seated.append(Seat(role, unit, rank, pool, DeviceKind.GPU, 0, place))

    if STUDENT not in recipe.cluster.roles and recipe.student.device != "cpu":
        if recipe.student.device.startswith("cuda:"):
            for rank in range(recipe.trainer.ranks):
                at(STUDENT, rank, recipe.student.device)
        elif gpus == 1:
            at(STUDENT, 0, recipe.student.device)
        else:
            claims.append(Claim(STUDENT, MACHINE, recipe.trainer.ranks, leads=True))
    if ROLLOUT not in recipe.cluster.roles and _engines_on_gpus(recipe):
        if recipe.rollout.devices:
            for unit, index, rank in _named_gpus(recipe.rollout.devices, names):
                at(ROLLOUT, unit, f"cuda:{index}", rank)
        elif gpus > 1 and (left or not recipe.rollout.processes):
            claims.append(_rollout_claim(recipe, MACHINE))
        else:  # no other GPU: share the student's
            device = recipe.student.device if recipe.rollout.processes else "auto"
            for unit in range(recipe.rollout.processes or recipe.rollout.replicas):
                at(ROLLOUT, unit, device)
    if CRITIC not in recipe.cluster.roles and critic_sits_apart(recipe) and critic_device(recipe) != "cpu":
        if gpus == 1 or critic_device(recipe).startswith("cuda:"):
            at(CRITIC, 0, critic_device(recipe))
        else:
            claims.append(Claim(CRITIC, MACHINE, 1))
    for name, teacher in recipe.teachers.items():
        if teacher.placement != "standalone" or teacher.device == "cpu":
            continue
        if (gpus == 1 and teacher.tensor_parallel == 1) or teacher.device.startswith("cuda:"):
            for unit in range(teacher.replicas):
                at(teacher_role(name), unit, teacher.device)
        else:
            claim = _teacher_claim(name, teacher, MACHINE, True)
            claims.append(replace(claim, may_share=claim.world_size == 1))
    return claims, seated


def _engines_on_gpus(recipe: Recipe) -> bool:
    """Whether rollouts are generated by processes that use this machine's GPUs, if it has any."""
    rollout = recipe.rollout
    return rollout.starts_servers or (rollout.processes > 0 and recipe.student.device != "cpu")


def _named_gpus(devices: Sequence[str], names: Sequence[str]) -> list[tuple[int, int, int]]:
    """`rollout.devices` as (unit, index among this process's GPUs, rank in its unit). A GPU that
    CUDA_VISIBLE_DEVICES hides from this process gets no seat: no other role can use it either."""
    found = []
    for unit, listed in enumerate(devices):
        for rank, name in enumerate(listed.split(",")):
            if name in names:
                found.append((unit, names.index(name), rank))
            elif name.isdigit() and list(names) == [str(index) for index in range(len(names))]:
                raise ClusterError(
                    f"rollout.devices names GPU {name}; this machine has {_count(len(names))}, numbered from 0"
                )
    return found
