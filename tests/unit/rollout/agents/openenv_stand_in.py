"""A server of OpenEnv's protocol (package 0.10) for the game of `small_openenv.py`, without the package."""

import json
import sys
from typing import Any

from aiohttp import WSMsgType, web

OPEN = {"sessions": 0}


def error(code: str, message: str) -> dict[str, Any]:
    return {"type": "error", "data": {"message": message, "code": code}}


def observation(hint: str, reward: float | None = None, done: bool = False) -> dict[str, Any]:
    return {
        "type": "observation",
        "data": {"observation": {"hint": hint}, "reward": reward, "done": done, "metadata": {}},
    }


async def session(request: web.Request) -> web.WebSocketResponse:
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    if OPEN["sessions"] >= int(sys.argv[2]):
        await socket.send_json(error("CAPACITY_REACHED", "Server at capacity"))
        await socket.close()
        return socket
    OPEN["sessions"] += 1
    number = 0
    try:
        async for message in socket:
            if message.type is not WSMsgType.TEXT:
                break
            asked = json.loads(message.data)
            if asked["type"] == "reset":
                number = 10 + asked["data"].get("seed", 0) + asked["data"].get("plus", 0)
                await socket.send_json(observation("Guess a number."))
            elif asked["type"] == "close":
                break
            elif set(asked["data"]) != {"guess"}:
                await socket.send_json(error("VALIDATION_ERROR", "Invalid message"))
            elif not asked["data"]["guess"].isdigit():
                await socket.send_json(error("EXECUTION_ERROR", "invalid literal for int()"))
            else:
                guess = int(asked["data"]["guess"])
                hint = "Right." if guess == number else "Higher." if guess < number else "Lower."
                await socket.send_json(observation(hint, 1.0 if guess == number else -0.25, guess == number))
    finally:
        OPEN["sessions"] -= 1
    return socket


app = web.Application()
app.router.add_get("/ws", session)
web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)
