"""Maps a recipe's roles to placement-group bundles on a Ray cluster.

[cluster.pools.NAME]     one bundle per node, each on a different machine; roles in the pool get the seats of `seat`
`standalone` teachers    one bundle per replica, on different machines if there are enough
every other role         on the trainer's machine: the student, and ranks, engines, workers, a critic without a pool.
                         Engine processes there take what is left of the student's pool, or share the student's GPUs
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal

from understudy.cluster.placement import DeviceKind, Placement, Seat
from understudy.cluster.ray_layout import Bundle, GroupRequest, NodeFacts, RayLayout, Spread, UnitBundle
from understudy.config import Recipe, TeacherConfig
from understudy.errors import ClusterError
from understudy.planning.seating import (
    CRITIC,
    ROLLOUT,
    STUDENT,
    WORKERS,
    critic_sits_apart,
    seat,
    teacher_role,
)


def ray_layout(recipe: Recipe, nodes: Sequence[NodeFacts]) -> RayLayout:
    """The layout of the recipe's processes on a cluster of these machines; raises `ClusterError` if they do
    not fit."""
    groups: dict[str, GroupRequest] = {}
    units: dict[str, UnitBundle] = {}
    placement = seat(recipe, None).placement
    has_gpus = any(node.total.gpus for node in nodes)
    students = recipe.cluster.roles.get(STUDENT)
    used = {teacher.pool for teacher in recipe.teachers.values() if teacher.placement == "pool"}
    used |= set(recipe.cluster.roles.values())
    for name, pool in recipe.cluster.pools.items():
        if name in used:
            bundle = Bundle(pool.cpus_per_node, pool.gpus_per_node)
            groups[f"pool {name}"] = GroupRequest(
                f"pool {name}", (bundle,) * pool.nodes, Spread.STRICT, leads=name == students
            )
    if students is not None:
        for rank in range(1, recipe.trainer.ranks):
            seats = placement.of(STUDENT, rank)
            if seats[0].node > 0:
                units[f"rank-{rank}"] = UnitBundle(f"pool {students}", seats[0].node, _share(seats))
    if recipe.rollout.processes:
        units |= _in_pool(recipe, placement, ROLLOUT, "rollout", recipe.rollout.processes)
    elif recipe.rollout.starts_servers:
        units |= _in_pool(recipe, placement, ROLLOUT, "vllm-replica", recipe.rollout.replicas)
    units |= _in_pool(recipe, placement, WORKERS, "rollout-worker", recipe.rollout.workers)
    if CRITIC in recipe.cluster.roles:
        seats = _of_one_node(placement, CRITIC, 0)
        units[CRITIC] = UnitBundle(f"pool {recipe.cluster.roles[CRITIC]}", seats[0].node, _share(seats))
    for name, teacher in recipe.teachers.items():
        role = teacher_role(name)
        if teacher.placement == "pool":
            for unit in range(teacher.replicas):
                seats = placement.of(role, unit)
                if len({one.node for one in seats}) > 1:
                    raise ClusterError(
                        f"{role}/{unit} sits on several machines; on Ray the ranks of a replica share one: lower "
                        f"teachers.{name}.tensor_parallel\n{placement.draw(seats[0].pool, seats[0].kind)}"
                    )
                units[f"{role}-{unit}"] = UnitBundle(f"pool {teacher.pool}", seats[0].node, _share(seats))
        elif teacher.placement == "standalone":
            share = _standalone(teacher, has_gpus)
            groups[role] = GroupRequest(role, (share,) * teacher.replicas, Spread.LOOSE)
            units |= {f"{role}-{unit}": UnitBundle(role, unit, share) for unit in range(teacher.replicas)}
    return RayLayout(groups, units)


def beside_the_trainer(recipe: Recipe) -> Recipe:
    """The recipe without the roles on other machines: what the trainer's own machine must have room for."""
    placement = seat(recipe, None).placement
    remote = sum(
        any(one.node for one in placement.of(STUDENT, rank)) for rank in range(1, recipe.trainer.ranks)
    )
    rollout = recipe.rollout
    if ROLLOUT in recipe.cluster.roles:  # its servers take no GPU here
        rollout = rollout.model_copy(update={"engine": "hf", "processes": 0})
    critic = recipe.critic
    if CRITIC in recipe.cluster.roles and critic is not None:  # nor does a critic in a pool
        critic = critic.model_copy(update={"process": False, "device": None})
    return recipe.model_copy(
        update={
            "teachers": {},
            "rollout": rollout,
            "critic": critic,
            "trainer": recipe.trainer.model_copy(update={"ranks": recipe.trainer.ranks - remote}),
            "cluster": recipe.cluster.model_copy(update={"pools": {}, "roles": {}}),
        }
    )


def gpus_outside_ray(recipe: Recipe) -> int | None:
    """How many of its machine's GPUs the trainer may give to engine processes without asking Ray, which may
    have assigned the remaining ones to teachers: those of the student's pool, or the student's own. None if
    no engine process needs one."""
    rollout = recipe.rollout
    if not rollout.processes or rollout.devices or ROLLOUT in recipe.cluster.roles:
        return None
    here = beside_the_trainer(recipe)
    pool = recipe.cluster.roles.get(STUDENT)
    own = here.trainer.ranks + critic_sits_apart(here)
    return max(own, recipe.cluster.pools[pool].gpus_per_node if pool else 0)


def cpus_of_own_ray(recipe: Recipe) -> int:
    """The CPU count that the run's own Ray cluster declares for this machine.

    Only this run uses it, so it declares as many as the recipe asks for: as with local processes, a high
    count is not refused."""
    teachers = sum(
        teacher.replicas * teacher.tensor_parallel * max(teacher.threads, 1)
        for teacher in recipe.teachers.values()
        if teacher.placement == "standalone"
    )
    pools = sum(pool.nodes * pool.cpus_per_node for pool in recipe.cluster.pools.values())
    queue = recipe.dataplane.storage_units + 1 if recipe.dataplane.backend == "transfer_queue" else 0
    return max(os.cpu_count() or 1, teachers + pools + queue)


def _in_pool(
    recipe: Recipe, placement: Placement, role: Literal["rollout", "workers"], process: str, units: int
) -> dict[str, UnitBundle]:
    """Homes of a role's processes, if the recipe gives it a pool. All seats of a unit are on one node."""
    pool = recipe.cluster.roles.get(role)
    if pool is None:
        return {}
    found = {}
    for unit in range(units):
        seats = _of_one_node(placement, role, unit)
        found[f"{process}-{unit}"] = UnitBundle(f"pool {pool}", seats[0].node, _share(seats))
    return found


def _of_one_node(placement: Placement, role: str, unit: int) -> list[Seat]:
    seats = placement.of(role, unit)
    if len({one.node for one in seats}) > 1:
        raise ClusterError(
            f"{role}/{unit} sits on several machines; lower run.threads\n{placement.draw(seats[0].pool, seats[0].kind)}"
        )
    return seats


def _share(seats: Sequence[Seat]) -> Bundle:
    return Bundle(0, len(seats)) if seats[0].kind is DeviceKind.GPU else Bundle(len(seats))


def _standalone(teacher: TeacherConfig, has_gpus: bool) -> Bundle:
    """A GPU per rank if the cluster has GPUs and the recipe does not say "cpu"; else a CPU per thread."""
    if teacher.device == "cpu" or (teacher.device == "auto" and not has_gpus):
        return Bundle(teacher.threads * teacher.tensor_parallel)
    return Bundle(1, teacher.tensor_parallel)
