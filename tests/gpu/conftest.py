"""Models, prompts and a teacher for each device, made once for all runs of a session."""

import os
from collections.abc import Iterator

import pytest
from device_models import save_model, save_prompts
from device_world import TOKEN_VARIABLE, Teachers, World


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("world")
    for family in ("qwen3", "llama"):
        save_model(folder / family, family, layers=2, seed=1)
    save_model(folder / "teacher", "llama", layers=3, seed=2)
    short = save_prompts(folder / "prompts.jsonl", between=(3, 20))
    return World(folder, short, save_prompts(folder / "long.jsonl", between=(700, 1500)))


@pytest.fixture(scope="session")
def teachers(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Teachers]:
    os.environ[TOKEN_VARIABLE] = "token-of-the-test-session"
    found = Teachers(world.model("teacher"), tmp_path_factory.mktemp("teachers"))
    yield found
    found.close()


@pytest.fixture(scope="session", autouse=True)
def _teachers_start_early(request: pytest.FixtureRequest, teachers: Teachers) -> None:
    """Starts the teachers' servers first, so that they load while tests without teachers run."""
    for item in request.session.items:
        settings = getattr(item, "callspec", None)
        if settings is not None and {"name", "device"} <= settings.params.keys():
            teachers.start(settings.params["device"])
