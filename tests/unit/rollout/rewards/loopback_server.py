"""A real HTTP server on loopback in the test's event loop."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

Handler = Callable[[Request], Awaitable[Response]]


def _endpoint(handler: Handler) -> Handler:
    """The handler as a plain function: starlette treats any other callable as an ASGI application."""

    async def answer(request: Request) -> Response:
        return await handler(request)

    return answer


@asynccontextmanager
async def serve(routes: dict[str, Handler]) -> AsyncIterator[str]:
    """Yields the base URL. `routes` maps paths to handlers of GET and POST."""
    methods = ["GET", "POST"]
    app = Starlette(
        routes=[Route(path, _endpoint(handler), methods=methods) for path, handler in routes.items()]
    )
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off"))
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await task
