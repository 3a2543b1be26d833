"""Rewards that need another process: math-verify in a sandboxed child, and a model as judge over HTTP."""

import asyncio
import importlib.util
from typing import Any

import pytest
from loopback_server import serve
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from understudy.errors import ConfigError, DataError, EngineError
from understudy.rollout.rewards import judge as judge_module
from understudy.rollout.rewards.judge import Judge
from understudy.rollout.rewards.math_reward import MathVerify
from understudy.rollout.tools.base import ToolOutcome, ToolResult

needs_math_verify = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed"
)


def grade(answer: Any, text: str, **settings: Any) -> dict[str, float]:
    async def body() -> dict[str, float]:
        reward = MathVerify(**settings)
        try:
            return await reward({"answer": answer}, text)
        finally:
            await reward.close()

    return asyncio.run(body())


@needs_math_verify
@pytest.mark.parametrize(
    ("answer", "text", "score"),
    [
        ("42", "so the answer is $42$", 1.0),
        ("42", "so the answer is $43$", 0.0),
        ("\\frac{1}{2}", "It is $0.5$.", 1.0),
        ("1/2", "\\boxed{\\frac{2}{4}}", 1.0),
        ("x^2+2x+1", "$(x+1)^2$", 1.0),
        ("7", "no number here", 0.0),
    ],
)
def test_math_verify_scores_answers_that_are_mathematically_equal(
    answer: str, text: str, score: float
) -> None:
    found = grade(answer, text)
    assert found["score"] == score and found["parsed"] == float(text != "no number here")


@needs_math_verify
def test_math_verify_scores_zero_when_grading_exceeds_its_deadline() -> None:
    result = grade("42", "$" + "9^" * 60 + "9$", deadline_s=3.0)
    assert result["score"] == 0.0


@needs_math_verify
def test_math_verify_raises_a_data_error_for_an_unreadable_reference_answer() -> None:
    with pytest.raises(DataError, match="reference answer"):
        grade("", "42")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7", {"score": 1.0, "parsed": 1.0, "timeout": 0.0}),
        ("9", {"score": 0.0, "parsed": 1.0, "timeout": 0.0}),
        ("words", {"score": 0.0, "parsed": 0.0, "timeout": 0.0}),
    ],
)
def test_math_verify_accepts_any_readable_answer_of_a_list(
    monkeypatch: pytest.MonkeyPatch, text: str, expected: dict[str, float]
) -> None:
    class Grader:
        async def call(self, arguments: dict[str, str], deadline_s: float) -> ToolResult:
            if not arguments["answer"].isdigit():
                return ToolResult(
                    ToolOutcome.ERROR, f"the reference answer {arguments['answer']!r} cannot be read"
                )
            verdict = "right" if arguments["answer"] == arguments["text"] else "wrong"
            return ToolResult(ToolOutcome.OK, verdict if arguments["text"].isdigit() else "unreadable")

    monkeypatch.setattr(MathVerify, "_pool", lambda self: Grader())
    assert grade(["six", "6", "7", "8"], text) == expected
    with pytest.raises(DataError, match="'sept' cannot be read"):
        grade(["seven", "sept"], text)


def test_math_verify_raises_a_data_error_for_a_row_without_an_answer() -> None:
    with pytest.raises(DataError, match="answer"):
        grade(None, "42")


@pytest.mark.skipif(importlib.util.find_spec("math_verify") is not None, reason="math-verify is installed")
def test_math_verify_names_the_install_command_when_the_package_is_missing() -> None:
    with pytest.raises(ConfigError, match="pip install math-verify"):
        grade("42", "42")


class JudgeServer:
    """Answers from a list; strings are replies, numbers are error statuses."""

    def __init__(self, *answers: str | int) -> None:
        self.answers = list(answers)
        self.requests: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.refusal_headers: dict[str, str] = {}
        """Headers of error answers."""

    async def __call__(self, request: Request) -> Response:
        self.requests.append(await request.json())
        self.headers.append(request.headers)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, int):
            return PlainTextResponse("not now", status_code=answer, headers=self.refusal_headers)
        return JSONResponse({"choices": [{"message": {"role": "assistant", "content": answer}}]})


ROW = {"prompt": "1+1?", "answer": "2 {exactly}"}


def ask(server: JudgeServer, **settings: Any) -> dict[str, float]:
    async def body() -> dict[str, float]:
        async with serve({"/v1/chat/completions": server}) as url:
            judge = Judge(f"{url}/v1", "judge-7b", **settings)
            try:
                return await judge(ROW, "it is {two}")
            finally:
                await judge.close()

    return asyncio.run(asyncio.wait_for(body(), 60))


@pytest.mark.parametrize(
    ("reply", "scale", "score"),
    [
        ("SCORE: 1", 1.0, 1.0),
        ("Well…\nscore: 7.5", 10.0, 0.75),
        ("SCORE: 99", 10.0, 1.0),
        ("SCORE: -3", 10.0, 0.0),
    ],
)
def test_the_judges_score_is_divided_by_the_scale_and_clamped(reply: str, scale: float, score: float) -> None:
    server = JudgeServer(reply)
    assert ask(server, scale=scale)["score"] == score
    (request,) = server.requests
    assert request["model"] == "judge-7b" and request["temperature"] == 0
    assert all(text in request["messages"][1]["content"] for text in ("1+1?", "2 {exactly}", "it is {two}"))


def test_the_judge_is_asked_again_when_its_reply_has_no_score() -> None:
    assert ask(JudgeServer("hm", "SCORE: 1"))["attempts"] == 2.0
    with pytest.raises(DataError, match=r"no `SCORE: n` in 4 tries.*hm"):
        ask(JudgeServer("hm"))


def test_the_judge_retries_error_statuses_with_backoff_and_finally_raises_an_engine_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sleeps: list[float] = []
    real = asyncio.sleep

    async def briefly(seconds: float) -> None:
        sleeps.append(seconds)
        await real(0)

    def waits(server: JudgeServer, **settings: Any) -> list[float]:
        sleeps.clear()
        assert ask(server, **settings)["score"] == 1.0
        return [one for one in sleeps if one >= 0.5]

    monkeypatch.setattr(judge_module.asyncio, "sleep", briefly)
    assert waits(JudgeServer(503, 429, "SCORE: 1")) == [0.5, 1.0]
    limited = JudgeServer(503, 429, "SCORE: 1")
    limited.refusal_headers = {"Retry-After": "30"}
    assert waits(limited) == [30.0, 30.0]
    limited.answers = [503, 429, "SCORE: 1"]
    assert waits(limited, deadline_s=0.75) == [0.75, 1.0], "Retry-After is capped by the judge's deadline"
    with pytest.raises(EngineError, match="503"):
        ask(JudgeServer(503))
    refused = JudgeServer(401)
    with pytest.raises(EngineError, match="401"):
        ask(refused)
    assert len(refused.requests) == 1, "401 is not retried"


def test_the_judges_api_key_comes_from_the_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(EngineError, match="JUDGE_KEY"):
        ask(JudgeServer("SCORE: 1"), key_variable="JUDGE_KEY")
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    server = JudgeServer("SCORE: 1")
    ask(server, key_variable="JUDGE_KEY")
    assert server.headers[0]["authorization"] == "Bearer s3cret"
