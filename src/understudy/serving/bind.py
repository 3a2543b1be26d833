"""Binds a server's socket; beyond loopback only with a token."""

from __future__ import annotations

import ipaddress
import socket

from understudy.errors import UnderstudyError


class StartError(UnderstudyError):
    """A server cannot start; the message is the one line a user sees."""


def bind_socket(bind: str, token: str | None) -> socket.socket:
    """A socket bound to HOST:PORT that does not listen yet. Without a token only loopback is allowed."""
    host, _, port = bind.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdigit() or int(port) > 65535:
        raise StartError(f"--bind {bind!r}: expected HOST:PORT, for example 127.0.0.1:8700")
    if not is_loopback(host) and token is None:
        raise StartError(
            f"--bind {bind}: refused without a token, anyone on the network could use this server; "
            "set UNDERSTUDY_TOKEN (or --token-env), or bind 127.0.0.1"
        )
    # IPPROTO_TCP is named: only then does asyncio turn off Nagle's algorithm, which would hold back the body
    # of a small reply until its head is acknowledged.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, int(port)))
    except OSError as error:
        sock.close()
        raise StartError(
            f"cannot bind {bind}: {error.strerror}; choose another port, or 0 for a free one"
        ) from error
    return sock


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def url_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
