"""The checksum of a body, which our clients and servers send in a header: TCP's own misses one damaged segment in 65,536.

A body that arrives with another checksum is treated as a broken connection: the request is sent again. It is no
fault of the row, nor a wrong answer of the teacher.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

HEADER = "x-body-crc32"
DAMAGED = 460
"""The status with which a server answers a request whose body was damaged."""


def checksum(body: bytes) -> str:
    return f"{zlib.crc32(body):08x}"


def is_damaged(headers: Mapping[str, str], body: bytes) -> bool:
    """False without the header: servers that are not ours send none."""
    expected = headers.get(HEADER)
    return expected is not None and expected != checksum(body)
