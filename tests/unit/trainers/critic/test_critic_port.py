"""The critic's port: requests need its token, and no invalid request crashes or changes the critic."""

import pytest
import torch
from starlette.testclient import TestClient
from test_critic_wire import critic_and_batch

from understudy.assembly.processes.critic import CriticCommands, app_of
from understudy.policy.ranks.wire import batch_columns, pack
from understudy.trainers.critic.messages import PATH, for_critic

MUTATIONS = 400


def client_and_values_frame() -> tuple[TestClient, bytes]:
    critic, batch = critic_and_batch()
    facts, columns = batch_columns(for_critic(batch))
    values = pack({"do": "values", "batch": facts, "max_tokens": 64}, columns)
    client = TestClient(app_of(CriticCommands(critic), "secret"), raise_server_exceptions=False)
    client.headers["Authorization"] = "Bearer secret"
    return client, values


@pytest.mark.parametrize(
    "token", ["", "Bearer", "Bearer no", "Bearer secretx", "Basic secret", "bearer secret"]
)
def test_a_request_to_the_critic_with_a_wrong_token_is_refused(token: str) -> None:
    client, values = client_and_values_frame()
    assert client.post(PATH, content=values, headers={"Authorization": token}).status_code == 401
    assert client.get("/health", headers={"Authorization": token}).json() == {"status": "ok"}


def test_invalid_frames_neither_crash_the_critic_nor_change_its_answers() -> None:
    client, values = client_and_values_frame()
    expected = client.post(PATH, content=values).content
    rng = torch.Generator().manual_seed(0)

    def number(below: int) -> int:
        return int(torch.randint(below, (), generator=rng))

    for frame in (b"", b"x", values[:20], values[:-1], values + b"\0", b"\xff" * 64):
        answer = client.post(PATH, content=frame)
        assert answer.status_code == 400 and answer.json()["error"]["message"], frame
    for head in ({}, {"do": "nothing"}, {"do": "values"}, {"do": "part", "names": ["x"]}):
        assert client.post(PATH, content=pack(head, {})).content != expected
    for _ in range(MUTATIONS):
        frame = bytearray(values)
        for _ in range(1 + number(4)):
            frame[number(len(frame))] = number(256)
        assert client.post(PATH, content=bytes(frame)).status_code in (200, 400, 500)
    assert client.post(PATH, content=values).content == expected
