"""Calls reward functions by their signature; as a script, tries one on a few rows.

The signature decides which of three shapes a function has (`shape_of`). `understudy check` runs this file as
a script in a child process, because a reward is user code that may hang, crash or print. It imports only the
standard library, so that it starts quickly.

    stdin    one JSON object: reward, paths, rows
    stdout   {"ready": true} after the import, then {"problem": …} or {"score": …} for each row; or one {"problem": …} before
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import math
import numbers
import os
import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from enum import StrEnum
from typing import Any

ANSWER = "an answer"
"""The student's text in a trial, for rows without an answer of their own."""

_MOST_CHARACTERS = 300
"""Characters of an exception's message that are shown."""


class Shape(StrEnum):
    TEXT = "(row, text)"
    TRAJECTORY = "(row, trajectory)"
    VERL = "(data_source, solution_str, ground_truth, extra_info)"


def shape_of(function: Callable[..., Any]) -> Shape:
    """The shape of a reward function, by the names of its parameters."""
    names = list(_parameters(function))
    if "solution_str" in names and "ground_truth" in names:
        return Shape.VERL
    if len(names) > 1 and names[1] == "trajectory":
        return Shape.TRAJECTORY
    return Shape.TEXT


def call_with(function: Callable[..., Any], shape: Shape, row: Mapping[str, Any], answer: Any) -> Any:
    """Calls a reward function according to its shape; the caller awaits the result of an async one."""
    if shape is not Shape.VERL:
        return function(row, answer)
    given = {
        "data_source": row.get("data_source") or "",
        "solution_str": answer,
        "ground_truth": ground_truth(row),
        "extra_info": dict(row.get("extra_info") or {}),
    }
    parameters = _parameters(function)
    if not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        given = {name: value for name, value in given.items() if name in parameters}
    return function(**given)


def ground_truth(row: Mapping[str, Any]) -> Any:
    """The reference answer: the column `answer`, or verl's `reward_model.ground_truth`; None if the row has
    neither."""
    answer = row.get("answer")
    if answer is None and isinstance(row.get("reward_model"), Mapping):
        answer = row["reward_model"].get("ground_truth")
    return answer


def score_in(result: Any) -> tuple[float, dict[str, float]] | None:
    """(score, further numbers) of a reward's result; None if it has no finite score."""
    found = dict(result) if isinstance(result, Mapping) else {"score": result}
    score = found.pop("score", found.pop("reward", None))
    if not _is_finite(score):
        return None
    return float(score), {str(name): float(value) for name, value in found.items() if _is_finite(value)}


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, numbers.Real) and math.isfinite(value)
    except OverflowError:  # an integer that is larger than any float
        return False


def is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def misfit(function: Callable[..., Any]) -> str | None:
    """Why a function cannot be called in any of the shapes; None if it can."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    shape = shape_of(function)
    given: tuple[list[Any], dict[str, Any]] = ([None, None], {})
    if shape is Shape.VERL:
        known = ("data_source", "solution_str", "ground_truth", "extra_info")
        given = [], {name: None for name in known if name in signature.parameters}
    try:
        signature.bind(*given[0], **given[1])
    except TypeError as error:
        return f"takes {signature} ({error}); expected {', '.join(Shape)}"
    return None


def _one_line(error: BaseException) -> str:
    """In one line: some libraries' messages are pages."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message if len(message) <= _MOST_CHARACTERS else message[:_MOST_CHARACTERS] + '…'}"


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # some builtins have none
        return {}


def _load(name: str) -> tuple[Any, str | None]:
    module_name, _, attribute = name.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        return (
            None,
            f"cannot be imported: {error}; modules are looked up beside the recipe and on the Python path (PYTHONPATH)",
        )
    except BaseException as error:
        return None, f"cannot be imported: {module_name} raised {_one_line(error)}"
    place = getattr(found, "__file__", None) or "built in"
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = get_close_matches(part, dir(found), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            return None, f"does not exist: {module_name} ({place}) has no function {attribute}{hint}"
        found = getattr(found, part)
    return (found, None) if callable(found) else (None, f"is a {type(found).__name__}; expected a function")


async def _score(function: Callable[..., Any], shape: Shape, row: dict[str, Any]) -> dict[str, Any]:
    truth = ground_truth(row)
    try:
        result = call_with(function, shape, row, str(truth) if truth is not None else ANSWER)
        if inspect.isawaitable(result):
            result = await result
    except BaseException as error:
        columns = (
            f" (the row has the columns {', '.join(sorted(row))})" if isinstance(error, KeyError) else ""
        )
        return {"problem": f"raised {_one_line(error)}{columns}"}
    found = score_in(result)
    if found is None:
        return {"problem": f"gave {result!r}; expected a finite number, or a dict with `score`"}
    return {"score": found[0]}


async def _all(function: Callable[..., Any], rows: list[dict[str, Any]], say: Callable[[Any], None]) -> None:
    shape = shape_of(function)
    for row in rows:
        if "messages" in row:
            row["messages"] = tuple(row["messages"])  # as in a run
        say(await _score(function, shape, row) if shape is not Shape.TRAJECTORY else {"score": None})
    close = getattr(function, "close", None)
    if inspect.iscoroutinefunction(close):
        await close()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the reward's own prints go to stderr

    def say(message: Any) -> None:
        print(json.dumps(message), file=answers, flush=True)

    request = json.loads(sys.stdin.readline())
    sys.path[:] = request["paths"]
    function, problem = _load(request["reward"])
    problem = problem or misfit(function)
    if problem:
        say({"problem": problem})
    else:
        say({"ready": True})
        asyncio.run(_all(function, request["rows"], say))
    os._exit(0)  # do not wait for threads that a reward left behind


if __name__ == "__main__":
    main()
