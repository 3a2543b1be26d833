"""What `[cluster]` and `[dataplane]` ask of each other."""

from __future__ import annotations

from understudy.config.trainer import ClusterConfig, DataPlaneConfig


def cluster_problems(cluster: ClusterConfig, dataplane: DataPlaneConfig) -> list[str]:
    problems = []
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
            "cluster.ray_auth = 'off' is for a cluster that runs already (cluster.address); a Ray of the run's own has a token"
        )
    return problems
