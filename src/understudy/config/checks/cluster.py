"""Checks `[cluster]` and `[dataplane]` against each other."""

from __future__ import annotations

from understudy.config.trainer import ClusterConfig, DataPlaneConfig


def cluster_problems(cluster: ClusterConfig, dataplane: DataPlaneConfig) -> list[str]:
    problems = []
    if cluster.backend == "ray":
        problems += [
            f"cluster.pools.{name}.nodes is missing: say over how many machines of the Ray cluster the pool goes (nodes = 1 is one)"
            for name, pool in cluster.pools.items()
            if "nodes" not in pool.model_fields_set
        ]
    if cluster.address is not None and "://" in cluster.address:
        problems.append(
            f"cluster.address = {cluster.address!r} goes through Ray's client, from outside the cluster; the trainer is one of its "
            "machines: run the command on one, with cluster.address = 'auto' or HOST:PORT of the head"
        )
    if cluster.backend == "local":
        if cluster.address is not None:
            problems.append(
                f"cluster.address = {cluster.address!r} is the address of a Ray cluster; set cluster.backend = 'ray', or leave it out"
            )
        if dataplane.backend == "transfer_queue":
            problems.append(
                "dataplane.backend = 'transfer_queue' runs on Ray: set cluster.backend = 'ray', or use 'embedded'"
            )
    elif cluster.ray_auth == "off" and cluster.address is None:
        problems.append(
            "cluster.ray_auth = 'off' is for a cluster that runs already (cluster.address); a Ray that the run starts itself has a token"
        )
    return problems
