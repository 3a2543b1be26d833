"""docs/teacher-protocol.md is complete: a client written from it alone gets the same scores; its example is right."""

import asyncio
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import second_client
from teacher_rig import TOKEN, random_items

from understudy.teacher.clients.http import REFUSALS
from understudy.teacher.clients.native import ReplicaClient
from understudy.teacher.protocol import encode_request, request_of
from understudy.types.scores import ScoreItem, Signal, TeacherScores

PAGE = Path(__file__).parents[3] / "docs" / "teacher-protocol.md"


def as_dict(item: ScoreItem) -> dict[str, Any]:
    return {
        "key": item.key,
        "tokens": item.tokens.tolist(),
        "positions": item.positions.tolist(),
        "signal": item.signal.value,
        "k": item.k,
        "ids": None if item.ids is None else item.ids.tolist(),
    }


def test_the_second_client_imports_only_the_standard_library() -> None:
    source = Path(second_client.__file__).read_text()
    assert set(re.findall(r"^(?:import|from) (\S+)", source, re.MULTILINE)) == {
        "hashlib",
        "http.client",
        "json",
        "struct",
        "urllib.parse",
    }


def test_the_second_client_gets_the_same_scores_as_replica_client(server: str) -> None:
    items = (
        random_items(3, 1, Signal.TOPK, 5)
        + random_items(2, 2, Signal.SAMPLED)
        + random_items(2, 3, Signal.AT_IDS, 3)
        + random_items(2, 4, Signal.HIDDEN)
    )
    items.append(
        ScoreItem("nothing to score", np.arange(3, dtype=np.int32), np.empty(0, np.int32), Signal.TOPK, 2)
    )

    async def ask() -> list[TeacherScores]:
        async with ReplicaClient(server, TOKEN) as client:
            return await client.score(items)

    ours = asyncio.run(ask())
    theirs = second_client.score(server, TOKEN, [as_dict(item) for item in items])
    for a, b in zip(ours, theirs, strict=True):
        assert (a.key, a.teacher) == (b["key"], b["teacher"])
        np.testing.assert_array_equal(a.sampled_logprobs, np.array(b["sampled"], np.float32))
        if a.ids is not None and a.logprobs is not None:
            np.testing.assert_array_equal(a.ids.reshape(-1), np.array(b["ids"], np.int32).reshape(-1))
            np.testing.assert_array_equal(
                a.logprobs.reshape(-1), np.array(b["logprobs"], np.float32).reshape(-1)
            )
        if a.hidden is not None:
            np.testing.assert_array_equal(a.hidden, np.array(b["hidden"], np.uint16))


def test_the_second_client_gets_the_status_and_kind_of_a_refusal(server: str) -> None:
    item = as_dict(random_items(1, 0, Signal.TOPK, 17)[0])
    with pytest.raises(RuntimeError, match="400 k: K = 17"):
        second_client.score(server, TOKEN, [item])
    with pytest.raises(RuntimeError, match="401 token"):
        second_client.score(server, "wrong", [item])


def worked_example() -> list[ScoreItem]:
    a = ScoreItem("a", np.array([5, 6, 7], np.int32), np.array([1, 2], np.int32), Signal.TOPK, 2)
    b = ScoreItem("b", np.array([8, 9], np.int32), np.array([1], np.int32), Signal.SAMPLED)
    return [a, b]


def test_the_pages_worked_example_is_the_frame_that_both_clients_send() -> None:
    block = PAGE.read_text().split("### A worked example")[1].split("```")[1]
    shown = b""
    for line in block.strip().splitlines():
        content = re.split(r"\s{4,}", line)[0]
        if content.startswith("{"):
            shown += content.replace("·", " ").encode()
        else:
            shown += bytes.fromhex(content.replace(" ", ""))
    items = worked_example()
    assert (
        shown == encode_request(request_of(items)) == second_client.request_frame([as_dict(i) for i in items])
    )


def test_the_page_names_every_refusal_the_client_knows() -> None:
    documented = {int(code) for code in re.findall(r"^\| (\d{3})", PAGE.read_text(), re.MULTILINE)}
    assert {400, 401, 413} <= documented & set(REFUSALS)
