"""Writes a Slurm job or a KubeRay manifest that starts Ray and a recipe's run on it.

The machines follow from `[cluster.pools]`: the nodes of every pool in use, and the trainer's machine if no pool
is the student's.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from understudy.config import Recipe
from understudy.config.trainer import PoolConfig
from understudy.errors import ConfigError
from understudy.planning.seating import STUDENT, critic_sits_apart

_RAY_PORT = 6379
_JOIN_SECONDS = 600
_TRAINER_CPUS = 8
"""CPUs of a pod whose pool sets no `cpus_per_node`."""


@dataclass(frozen=True, slots=True)
class Machines:
    """What a run needs: the head, where the trainer runs, and groups of further machines by pool."""

    head: PoolConfig
    """Of one node."""
    others: dict[str, PoolConfig]

    @property
    def nodes(self) -> int:
        return 1 + sum(pool.nodes for pool in self.others.values())

    @property
    def gpus_per_node(self) -> int:
        """Of the largest, for a cluster whose machines are alike."""
        return max(pool.gpus_per_node for pool in (self.head, *self.others.values()))


def machines_of(recipe: Recipe) -> Machines:
    """Raises if the recipe is not for Ray."""
    if recipe.cluster.backend != "ray":
        raise ConfigError(
            'cluster.backend = "local" runs on one machine; set cluster.backend = "ray" and [cluster.pools] to launch a job on several'
        )
    roles, teachers = recipe.cluster.roles, recipe.teachers.values()
    used = {*roles.values(), *(teacher.pool for teacher in teachers if teacher.placement == "pool")}
    others = {name: pool for name, pool in recipe.cluster.pools.items() if name in used}
    own = roles.get(STUDENT)
    if own is None:
        gpus = 0 if recipe.student.device == "cpu" else recipe.trainer.ranks + critic_sits_apart(recipe)
        return Machines(PoolConfig(nodes=1, gpus_per_node=gpus, cpus_per_node=_TRAINER_CPUS), others)
    pool = others.pop(own)
    if pool.nodes > 1:
        others[own] = pool.model_copy(update={"nodes": pool.nodes - 1})
    return Machines(pool.model_copy(update={"nodes": 1}), others)


def slurm_script(
    machines: Machines, recipe: str, overrides: Sequence[str], run: str, flags: Sequence[str]
) -> str:
    """A batch script. `flags` are further lines of sbatch. A job that Slurm starts again resumes the run."""
    head = [
        f"--nodes={machines.nodes}",
        "--ntasks-per-node=1",
        "--exclusive",
        "--requeue",
        "--signal=B:TERM@180",
    ]
    if machines.gpus_per_node:
        head.append(f"--gpus-per-node={machines.gpus_per_node}")
    lines = [f"#SBATCH {flag}" for flag in (*head, *flags)]
    train = shlex.join(["understudy", "train", recipe, *overrides, "cluster.backend=ray"])
    return f"""#!/bin/bash
{chr(10).join(lines)}
# The batch script runs on the first node, which is Ray's head and has the trainer.
set -euo pipefail
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$(openssl rand -hex 32)
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
address=$(srun --nodes=1 --ntasks=1 --overlap -w "$head" hostname --ip-address | awk '{{print $1}}'):{_RAY_PORT}
srun --nodes=1 --ntasks=1 --overlap -w "$head" ray start --head --port={_RAY_PORT} --include-dashboard=false --block &
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
  others=$((SLURM_JOB_NUM_NODES - 1))
  # Workers ask again until the head answers.
  srun --nodes=$others --ntasks=$others --overlap --exclude="$head" \\
    bash -c 'until ray start --address="$0" --block; do sleep 2; done' "$address" &
fi
joined='import ray, sys; ray.init(sys.argv[1], logging_level="ERROR"); sys.exit(sum(n["Alive"] for n in ray.nodes()) < int(sys.argv[2]))'
until python3 -c "$joined" "$address" "$SLURM_JOB_NUM_NODES" 2>/dev/null; do
  if [ "$SECONDS" -gt {_JOIN_SECONDS} ]; then
    echo "not all $SLURM_JOB_NUM_NODES nodes joined Ray at $address in {_JOIN_SECONDS} s" >&2
    exit 1
  fi
  sleep 2
done
run={shlex.quote(run)}${{SLURM_JOB_ID:+-$SLURM_JOB_ID}}
# exec: Slurm's TERM reaches the trainer, which saves. Started again, the same job resumes.
if [ -e "$run/recipe.json" ]; then
  exec understudy resume "$run" cluster.address="$address"
fi
exec {train} cluster.address="$address" run.dir="$run"
"""


def kuberay_manifest(
    machines: Machines,
    recipe: str,
    overrides: Sequence[str],
    run: str,
    name: str,
    image: str,
    claim: str,
    memory: str,
) -> str:
    """A RayJob: the head with the trainer, one worker group per pool, a shared volume at /shared."""
    command = [
        "understudy",
        "train",
        recipe,
        *overrides,
        "cluster.backend=ray",
        "cluster.address=auto",
        f"run.dir={run}",
    ]
    manifest: dict[str, Any] = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": name},
        "spec": {
            "entrypoint": shlex.join(command),
            "shutdownAfterJobFinishes": True,
            "rayClusterSpec": {
                "authOptions": {"mode": "token"},
                # The job's submission needs the dashboard; keep its port inside the cluster.
                "headGroupSpec": {
                    "rayStartParams": {"include-dashboard": "true"},
                    "template": _pod(machines.head, image, claim, memory),
                },
                "workerGroupSpecs": [
                    {
                        "groupName": pool_name,
                        "replicas": pool.nodes,
                        "minReplicas": pool.nodes,
                        "maxReplicas": pool.nodes,
                        "rayStartParams": {},
                        "template": _pod(pool, image, claim, memory),
                    }
                    for pool_name, pool in machines.others.items()
                ],
            },
        },
    }
    return yaml.safe_dump(manifest, sort_keys=False)


def _pod(pool: PoolConfig, image: str, claim: str, memory: str) -> dict[str, Any]:
    limits = {"cpu": str(pool.cpus_per_node or _TRAINER_CPUS), "memory": memory}
    if pool.gpus_per_node:
        limits["nvidia.com/gpu"] = str(pool.gpus_per_node)
    container = {
        "name": "ray",
        "image": image,
        "volumeMounts": [{"name": "shared", "mountPath": "/shared"}],
        "resources": {"limits": limits, "requests": dict(limits)},
    }
    volume = {"name": "shared", "persistentVolumeClaim": {"claimName": claim}}
    return {"spec": {"containers": [container], "volumes": [volume]}}
