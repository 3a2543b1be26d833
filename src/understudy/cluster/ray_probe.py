"""Probes whether a Ray head answers at an address, before `ray.init`, which never times out.

A head speaks gRPC, so it begins each connection with an HTTP/2 SETTINGS frame. By that frame the probe distinguishes
a Ray head from a closed port, a port that sends nothing and another service. Each case gives an error within
seconds, with advice.
"""

from __future__ import annotations

import os
import socket
import threading
import time

from ray._private import services

from understudy.errors import ClusterError

PROBE_SECONDS = 5.0
_GRACE_SECONDS = 0.5
"""Extra seconds for the probing thread to report its own timeout, which names what it waited for."""
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
"""The HTTP/2 client preface with an empty SETTINGS frame."""
_FRAME_HEADER, _SETTINGS = 9, 4
_ADVICE = (
    "start it (`ray start --head --port=6379` on its first machine), or set cluster.address to HOST:PORT of one that runs; "
    "without cluster.address the run starts a Ray of its own (docs/cluster.md)"
)


def require_answer(address: str, seconds: float = PROBE_SECONDS) -> None:
    """Return when a Ray head answers at `address` (`auto`, or HOST:PORT); else `ClusterError` after about `seconds`.

    Runs in a daemon thread: a name lookup has no deadline, and one that still waits must not keep the process
    alive.
    """
    problems: list[str] = []
    asking = threading.Thread(target=_ask, args=(address, seconds, problems), name="ray-probe", daemon=True)
    asking.start()
    asking.join(seconds + _GRACE_SECONDS)
    if asking.is_alive():
        problems.append(f"no answer within {seconds:g} s; {_ADVICE}")
    if problems:
        raise ClusterError(f"cluster.address = {address!r}: {problems[0]}")


def _ask(address: str, seconds: float, problems: list[str]) -> None:
    deadline = time.monotonic() + seconds
    try:
        host, port = head_of(address)
    except ClusterError as error:
        problems.append(str(error))
        return
    where = f"{host}:{port}"
    try:
        with socket.create_connection((host, port), timeout=seconds) as line:
            if not _speaks_grpc(line, deadline):
                problems.append(f"what listens at {where} is not the head of a Ray cluster; {_ADVICE}")
    except socket.gaierror as error:
        problems.append(f"no machine is called {host!r} ({error.strerror}); {_ADVICE}")
    except TimeoutError:
        problems.append(f"nothing answered at {where} within {seconds:g} s; {_ADVICE}")
    except OSError as error:
        problems.append(f"no Ray cluster is at {where} ({error.strerror or error}); {_ADVICE}")


def head_of(address: str) -> tuple[str, int]:
    """Where `ray.init(address=…)` would look: `auto` is RAY_ADDRESS, or the cluster this machine belongs to."""
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or address
    if "://" in address:
        raise ClusterError(
            f"{address!r} goes through Ray's client, from outside the cluster; the trainer is one of its machines: run the "
            "command on one, with cluster.address = 'auto' or HOST:PORT of the head (6379 by default)"
        )
    try:
        found = services.canonicalize_bootstrap_address(address)
    except ConnectionError:  # Ray's own message names options of its command line
        raise ClusterError(f"no Ray runs on this machine, and RAY_ADDRESS is not set; {_ADVICE}") from None
    except ValueError:
        found = None
    host, _, port = (found or "").rpartition(":")
    if not host or not port.isdigit():
        raise ClusterError(f"expected HOST:PORT or 'auto', found {address!r}")
    return host.strip("[]"), int(port)


def _speaks_grpc(line: socket.socket, deadline: float) -> bool:
    """Whether the peer begins with a SETTINGS frame.

    Not checked under TLS, where it begins with a handshake.
    """
    if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
        return True
    line.sendall(_PREFACE)
    received = b""
    while len(received) < _FRAME_HEADER:
        line.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            chunk = line.recv(_FRAME_HEADER - len(received))
        except (TimeoutError, ConnectionError):
            return False
        if not chunk:
            return False
        received += chunk
    return received[3] == _SETTINGS
