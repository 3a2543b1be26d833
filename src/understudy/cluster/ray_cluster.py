"""The connection to a Ray cluster: token, resources of its machines, placement groups.

Without an address the run starts its own Ray on this machine, with the dashboard off, and ends it with the
run. Either way token authentication is on by default, because a client of Ray can run any code on every
machine of the cluster.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from understudy.cluster.ray_layout import Bundle, GroupRequest, NodeFacts, Spread, draw, misfit
from understudy.cluster.ray_probe import require_answer
from understudy.errors import ClusterError

_LOCAL_OBJECT_STORE = 100 * 2**20
"""Bytes. No data of ours passes through Ray's object store, so a small one will do."""
_SETTLE_SECONDS = 5.0
"""How long released resources may take to show as free."""
_NODE_PROCESSES = ("raylet", "gcs_server")
"""Without these nothing runs, and nothing can be started, on a Ray of one machine."""


@dataclass(frozen=True, slots=True)
class RaySettings:
    address: str | None = None
    """`auto` or HOST:PORT of a running cluster; None starts one on this machine."""
    token: bool = True
    """Whether Ray's token authentication must be on."""
    cpus: int | None = None
    """CPUs of a cluster that is started here."""


_holding = False
"""Whether a Ray that this process started outlives its `RayCluster` (inside `held_ray`)."""


def is_connected() -> bool:
    return bool(ray.is_initialized())


@contextlib.contextmanager
def held_ray() -> Iterator[None]:
    """Keeps the run's own Ray until the end of this block, over every restart of the run in it.

    Ray runs code between fork and exec when it starts its processes. In a process that has trained, and has
    threads of torch and of broken process groups, such a child may wait for ever for a lock that no thread of
    the child will release.
    """
    global _holding
    _holding, before = True, os.environ.get("RAY_AUTH_TOKEN")
    try:
        yield
    finally:
        _holding = False
        if ray.is_initialized():
            ray.shutdown()
        if before is None:
            os.environ.pop("RAY_AUTH_TOKEN", None)


class RayCluster:
    """This process's connection to Ray and the placement groups it holds; used by `RayProcesses`."""

    def __init__(self, settings: RaySettings) -> None:
        self._groups: dict[str, PlacementGroup] = {}
        self._own = settings.address is None and (_holding or not ray.is_initialized())
        """Whether the run started this Ray, in this attempt or an earlier one. It has one machine, and gets no other."""
        if ray.is_initialized():
            self._ours = self._made_token = False
            return
        self._ours = True
        self._made_token = _require_token(settings)
        if settings.address is not None:
            require_answer(settings.address)
        options: dict[str, Any] = {} if settings.address else _local_options(settings)
        try:
            ray.init(
                address=settings.address or "local",  # None would connect to any Ray on this machine
                log_to_driver=False,
                configure_logging=False,
                logging_level=logging.ERROR,
                namespace=f"understudy-{secrets.token_hex(4)}",
                **options,
            )
        except Exception as error:
            where = settings.address or "on this machine"
            raise ClusterError(f"Ray ({where}) cannot be used: {_first_line(error)}") from error

    def nodes(self) -> list[NodeFacts]:
        """The live machines, with the free resources of each."""
        free = ray._private.state.available_resources_per_node()
        own = ray.get_runtime_context().get_node_id()
        found = []
        for node in ray.nodes():
            if node["Alive"]:
                name = f"{node['NodeManagerAddress']}/{node['NodeID'][:6]}"
                found.append(
                    NodeFacts(
                        name,
                        _bundle(node["Resources"]),
                        _bundle(free.get(node["NodeID"], {})),
                        is_trainers=node["NodeID"] == own,
                        node_id=node["NodeID"],
                    )
                )
        return found

    def take(self, requests: Sequence[GroupRequest], timeout: float) -> None:
        """Reserve these groups; `ClusterError` within seconds if they do not fit, after `timeout` if Ray does
        not place them."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        while (problem := misfit(requests, self.nodes())) is not None:
            self.require_machine()
            if time.monotonic() > deadline:
                raise ClusterError(problem)
            time.sleep(0.2)
        for request in requests:
            group = placement_group(
                [bundle.resources() for bundle in request.bundles],
                strategy=request.spread.value,
                bundle_label_selector=_pinned(request),
            )
            self._groups[request.name] = group
            refusal = self._refusal(request, group, timeout)
            if refusal is not None:
                self.give_back(request.name)
                raise ClusterError(refusal)

    def _refusal(self, request: GroupRequest, group: PlacementGroup, timeout: float) -> str | None:
        """None once Ray has placed the group, else the reason. A machine may be lost while we wait."""
        deadline, misfit_since = time.monotonic() + timeout, math.inf
        while not group.wait(1):
            self.require_machine()
            now, problem = time.monotonic(), misfit([request], self.nodes())
            misfit_since = math.inf if problem is None else min(misfit_since, now)
            if problem is not None and now - misfit_since > _SETTLE_SECONDS:
                return problem
            if now > deadline:
                found = f"Ray did not find room for {len(request.bundles)} bundles within {timeout:.0f} s"
                return f"{request.name}: {found}\n{draw(self.nodes())}"
        return None

    def require_machine(self) -> None:
        """`ClusterError` if this Ray is the run's own and has lost its only machine. A cluster that others own may get
        another one."""
        node: Any = ray._private.worker._global_node
        if not self._own or node is None:
            return
        for kind, process in node.dead_processes():
            if kind in _NODE_PROCESSES:
                raise ClusterError(
                    f"machine {node.node_ip_address}/{node.node_id[:6]}, the only one of the run's own Ray, is lost: its {kind} "
                    f"ended with code {process.returncode}; `understudy resume` continues from the last checkpoint, with a new Ray"
                )

    def group(self, name: str) -> PlacementGroup:
        return self._groups[name]

    def why_not_placed(self, request: GroupRequest, bundle: int) -> str | None:
        """Why a bundle that lost its machine gets no other now; None if it has one or will get one."""
        places = placement_group_table(self._groups[request.name])["bundles_to_node_id"]
        nodes = {node["NodeID"]: node["Alive"] for node in ray.nodes()}
        if nodes.get(places.get(bundle, "")):
            return None
        taken = {place for other, place in places.items() if other != bundle and place}
        strict = request.spread is Spread.STRICT
        room = [node for node in self.nodes() if not (strict and node.node_id in taken)]
        return misfit([replace(request, bundles=(request.bundles[bundle],))], room)

    def give_back(self, name: str) -> None:
        group = self._groups.pop(name, None)
        if group is not None:
            remove_placement_group(group)

    def close(self) -> None:
        if not ray.is_initialized():
            return
        for name in list(self._groups):
            self.give_back(name)
        if _holding:
            return
        if self._ours:
            ray.shutdown()
        if self._made_token:
            os.environ.pop("RAY_AUTH_TOKEN", None)


def _pinned(request: GroupRequest) -> list[dict[str, str]] | None:
    """`leads` as Ray's label selector: the first bundle goes to the node of this process."""
    if not request.leads:
        return None
    own = ray.get_runtime_context().get_node_id()
    return [{"ray.io/node-id": own}, *({} for _ in request.bundles[1:])]


def _local_options(settings: RaySettings) -> dict[str, Any]:
    return {
        "num_cpus": settings.cpus,
        "include_dashboard": False,
        "object_store_memory": _LOCAL_OBJECT_STORE,
    }


def use_token(token: str | None = None) -> None:
    """Turn on Ray's token authentication for this process and its children; None keeps the token it has."""
    os.environ["RAY_AUTH_MODE"] = "token"
    if token is not None:
        os.environ["RAY_AUTH_TOKEN"] = token
    # Ray read its settings at import; this makes it read them again.
    raylet: Any = ray._raylet
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


def _require_token(settings: RaySettings) -> bool:
    """Make a token for our own Ray; require that a given cluster's is set here.

    Returns whether one was made.
    """
    if not settings.token:
        return False
    known = any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    if settings.address is None:
        use_token(None if known else secrets.token_urlsafe(32))
        return not known
    if known or (Path.home() / ".ray" / "auth_token").exists():
        use_token()
        return False
    raise ClusterError(
        f"cluster.address = {settings.address!r}: no token for that cluster. Make one with `ray get-auth-token "
        "--generate`, start every node with RAY_AUTH_MODE=token, and set RAY_AUTH_TOKEN here (docs/cluster.md); or set "
        "cluster.ray_auth = 'off' if the cluster has no authentication and its network is your own"
    )


def _bundle(resources: Mapping[str, float]) -> Bundle:
    return Bundle(float(resources.get("CPU", 0.0)), float(resources.get("GPU", 0.0)))


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
