"""Where a server answers, and how many bytes went there and back."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit

from understudy.serving.bind import is_loopback


@dataclass(slots=True)
class Traffic:
    """Bytes of requests and answers of all engine processes or servers so far, without HTTP headers."""

    sent: int = 0
    received: int = 0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of a server."""

    url: str
    token: str | None = field(default=None, repr=False)
    socket: str | None = None
    """A Unix domain socket; the url's host then only fills the Host header."""
    shares_memory: bool = True
    """Whether the server can map weights from this machine's memory."""
    gpu: str | None = None
    """The id of the GPU that holds its weights, if the server reported one."""

    @property
    def on_loopback(self) -> bool:
        """Whether it names the loopback, which every machine resolves to itself."""
        return is_loopback(urlsplit(self.url).hostname or "")
