"""The page's server: loopback, a token in the address, GET alone, JSON by range, nothing from outside.

    http://127.0.0.1:PORT/TOKEN/             the page
    http://127.0.0.1:PORT/TOKEN/page/FILE    its modules and styles
    http://127.0.0.1:PORT/TOKEN/api/NAME     JSON; ?run=N names the run
    http://127.0.0.1:PORT/TOKEN/media/HASH   a picture of that run

A request is refused whose Host is not loopback (a name that was made to point here), or whose Origin or
Sec-Fetch-Site is another site's. The content policy allows the page's own files alone and no inline script.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import resources
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from understudy.errors import UnderstudyError
from understudy.viewer.recipe_diff import differences
from understudy.viewer.rows import LABELS, NUMBERS
from understudy.viewer.run_view import RunView

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
WATCHED_SECONDS = 30.0
"""Runs are read on while a page asked for something within this time."""
LOOK_SECONDS = 1.0
MOST_ROWS, MOST_POINTS = 200, 4000

Question = Callable[[RunView, QueryParams], Any]


class ViewServer:
    """The ASGI application of one or several runs, and the thread that reads on."""

    def __init__(self, runs: Sequence[RunView], token: str | None = None) -> None:
        self.runs, self.token = list(runs), token or secrets.token_urlsafe(18)
        self._asked = time.monotonic()
        self._end = threading.Event()
        routes = [
            Route("/{token}/", self._page, methods=["GET"]),
            Route("/{token}/page/{name}", self._page, methods=["GET"]),
            Route("/{token}/api/{name}", self._api, methods=["GET"]),
            Route("/{token}/media/{name}", self._picture, methods=["GET"]),
        ]
        self.app = Starlette(routes=routes)
        self._reader = threading.Thread(target=self._read_on, name="view-reader", daemon=True)

    def start(self) -> None:
        self._reader.start()

    def close(self) -> None:
        self._end.set()

    def _read_on(self) -> None:
        while not self._end.is_set():
            more = False
            if time.monotonic() - self._asked < WATCHED_SECONDS:
                for run in self.runs:
                    with suppress(Exception):  # a run directory may vanish or be damaged at any moment
                        more = run.look() or more
            self._end.wait(0.005 if more else LOOK_SECONDS)

    def _refusal(self, request: Request) -> Response | None:
        host = request.headers.get("host", "")
        name = host.rpartition("]")[0].removeprefix("[") or host.partition(":")[0]
        if name not in ("127.0.0.1", "localhost", "::1"):
            return _text(403, "this server answers to loopback alone")
        origin = request.headers.get("origin")
        if origin not in (None, f"http://{host}"):
            return _text(403, "requests from other sites are refused")
        if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return _text(403, "requests from other sites are refused")
        if not hmac.compare_digest(request.path_params["token"].encode(), self.token.encode()):
            return _text(404, "not found: open the whole address that `understudy view` printed")
        self._asked = time.monotonic()
        return None

    async def _page(self, request: Request) -> Response:
        if refused := self._refusal(request):
            return refused
        name = request.path_params.get("name", "index.html")
        ending = name[name.rfind(".") :]
        if "/" in name or name.startswith(".") or ending not in TYPES:
            return _text(404, "not found")
        file = resources.files("understudy.viewer") / "page" / name
        if not file.is_file():
            return _text(404, "not found")
        return Response(file.read_bytes(), headers=HEADERS, media_type=f"{TYPES[ending]}; charset=utf-8")

    async def _api(self, request: Request) -> Response:
        if refused := self._refusal(request):
            return refused
        name, asked = request.path_params["name"], request.query_params
        try:
            if name == "runs":
                answer = await run_in_threadpool(lambda: [run.summary() for run in self.runs])
            elif name == "recipes":
                answer = await run_in_threadpool(lambda: differences([run.recipe() for run in self.runs]))
            elif name in QUESTIONS:
                run = self.runs[int(asked.get("run", 0))]
                answer = await run_in_threadpool(QUESTIONS[name], run, asked)
            else:
                return _text(404, "not found")
        except UnderstudyError as error:
            return _text(404, str(error))
        except (ValueError, IndexError, KeyError) as error:
            return _text(400, f"{type(error).__name__}: {error}")
        return Response(msgspec.json.encode(answer), headers=HEADERS, media_type="application/json")

    async def _picture(self, request: Request) -> Response:
        if refused := self._refusal(request):
            return refused
        try:
            run = self.runs[int(request.query_params.get("run", 0))]
            data, kind = await run_in_threadpool(run.picture, request.path_params["name"])
        except (UnderstudyError, ValueError, IndexError) as error:
            return _text(404, str(error))
        return Response(data, headers=HEADERS, media_type=kind)


def _text(status: int, text: str) -> Response:
    return Response(text, status, HEADERS, "text/plain; charset=utf-8")


def _rows(run: RunView, asked: Mapping[str, str]) -> Any:
    labels = {name: asked[name] for name in LABELS if asked.get(name)}
    ranges = {
        name: (_float(asked.get(f"{name}_min")), _float(asked.get(f"{name}_max")))
        for name in NUMBERS
        if f"{name}_min" in asked or f"{name}_max" in asked
    }
    return run.rows(
        labels=labels, ranges=ranges, text=asked.get("q", ""), sort=asked.get("sort", "step"),
        descending=asked.get("desc", "1") == "1", offset=max(0, int(asked.get("offset", 0))),
        limit=min(MOST_ROWS, int(asked.get("limit", 50))),
    )  # fmt: skip


def _curves(run: RunView, asked: QueryParams) -> Any:
    points = min(MOST_POINTS, max(2, int(asked.get("points", 1000))))
    return run.curves(asked.getlist("key"), points)


def _float(text: str | None) -> float | None:
    return float(text) if text else None


QUESTIONS: dict[str, Question] = {
    "keys": lambda run, asked: run.metric_names(),
    "curves": _curves,
    "recipe": lambda run, asked: run.recipe(),
    "held-out": lambda run, asked: run.held_out(),
    "advisories": lambda run, asked: run.advisories(),
    "waits": lambda run, asked: run.waits(),
    "rows": _rows,
    "row": lambda run, asked: run.row(
        asked["id"], int(asked.get("first", 0)), int(asked["at"]) if asked.get("at") else None
    ),
    "candidates": lambda run, asked: run.candidates(
        asked["id"], int(asked["from"]), min(int(asked["to"]), int(asked["from"]) + 64)
    ),
    "worst": lambda run, asked: run.worst(int(asked["step"]) if asked.get("step") else None),
    "same": lambda run, asked: run.same_prompt(int(asked["sum"])),
    "timeline": lambda run, asked: run.timeline(_float(asked.get("from")), _float(asked.get("to"))),
    "life": lambda run, asked: run.life(asked["key"]),
}
"""Name in the address → the answer."""


def listen(port: int) -> socket.socket:
    """A listening socket on loopback; 0: any free port."""
    sock = socket.create_server(("127.0.0.1", port))
    sock.set_inheritable(False)
    return sock


def address(server: ViewServer, sock: socket.socket) -> str:
    return f"http://127.0.0.1:{sock.getsockname()[1]}/{server.token}/"
