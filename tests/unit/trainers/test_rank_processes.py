"""A follower that cannot start says why in its own words."""

from pathlib import Path

import pytest

from understudy.cluster.local import LocalProcesses
from understudy.errors import ChildDied
from understudy.observability.rundir import RunDir
from understudy.trainers.ranks import Followers, refusal_file


async def fail_to_start(folder: Path) -> tuple[str, Followers]:
    processes = LocalProcesses(folder / "logs", start_timeout=60)
    followers = Followers(processes, RunDir(folder), size=2)
    try:
        with pytest.raises(ChildDied) as caught:
            await followers.start(1)
        return str(caught.value), followers
    finally:
        followers.end_at_once()
        await followers.close()
        await processes.close()


@pytest.mark.parametrize("spoiled", ["", pytest.param("{}", marks=pytest.mark.slow)])
def test_its_own_error_comes_first(tmp_path: Path, spoiled: str) -> None:
    import asyncio

    if spoiled:
        (tmp_path / "recipe.json").write_text(spoiled)
    said, followers = asyncio.run(fail_to_start(tmp_path))
    expected = "ConfigError: `student` is missing" if spoiled else "RunDirectoryError:"
    assert expected in said.splitlines()[0], said
    assert not followers.meeting.exists()


def test_a_refusal_is_found_by_command_and_rank(tmp_path: Path) -> None:
    processes = LocalProcesses(tmp_path)
    followers = Followers(processes, RunDir(tmp_path), size=3)
    followers._children = {1: None, 2: None}  # type: ignore[dict-item]
    refusal_file(followers.meeting, 7, 2).write_text("too long")
    assert followers.refused(7) == {2: "too long"} and followers.refused(6) == {}
