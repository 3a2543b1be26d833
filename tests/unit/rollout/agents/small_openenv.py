"""A guessing game written with OpenEnv's package. `python small_openenv.py PORT SESSIONS` serves it."""

import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    guess: str


class Hint(Observation):
    hint: str


class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.number, self.tries = 0, 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> Hint:
        self.number, self.tries = 10 + (seed or 0) + int(more.get("plus", 0)), 0
        return Hint(hint="Guess a number.")

    def step(self, action: Guess, timeout_s: float | None = None, **more: Any) -> Hint:
        self.tries += 1
        guess = int(action.guess)
        if guess == self.number:
            return Hint(hint="Right.", done=True, reward=1.0)
        return Hint(hint="Higher." if guess < self.number else "Lower.", reward=-0.25)

    @property
    def state(self) -> State:
        return State(step_count=self.tries)


if __name__ == "__main__":
    app = create_fastapi_app(Game, Guess, Hint, max_concurrent_envs=int(sys.argv[2]))
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
