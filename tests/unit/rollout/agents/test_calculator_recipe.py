"""The calculator recipe's training conversations equal what the real tool loop would produce."""

import random
import sys
from pathlib import Path

import pytest

from understudy.rollout.agents.toolcalls import BadCall, ToolCall, parse_hermes
from understudy.rollout.tools.calculator import calculator

sys.path.insert(0, str(Path(__file__).parents[4] / "recipes" / "calculator"))
from chat import WORDS, build_tokenizer, call_text
from problems import Problem, conversation, from_the_head, make_splits

PROBLEM = Problem("347 times 86 minus 12", "347*86-12", "29830")


def test_splits_share_no_question_and_answers_match_the_calculator() -> None:
    splits = make_splits()
    questions = [{one.question for one in part} for part in (splits.test, splits.valid, splits.sft)]
    assert not questions[0] & questions[1] and not (questions[0] | questions[1]) & questions[2]
    for problem in splits.test:
        assert calculator(problem.expression) == problem.answer


def test_a_conversation_consists_of_question_tool_call_tool_result_and_answer() -> None:
    user, call, tool, answer = conversation(PROBLEM)
    assert parse_hermes(call.content) == [ToolCall("calculator", {"expression": "347*86-12"})]
    assert (user.trained, call.trained, tool.trained, answer.trained) == (False, True, False, True)
    assert tool.content == answer.content == from_the_head(PROBLEM)[-1].content == "29830"


@pytest.mark.parametrize("seed", range(40))
def test_the_error_reply_to_a_corrupted_call_equals_the_tool_loops_error(seed: int) -> None:
    _, corrupted, reply, *rest = conversation(PROBLEM, random.Random(seed))
    assert not corrupted.trained and rest == conversation(PROBLEM)[1:]
    (call,) = parse_hermes(corrupted.content)
    if isinstance(call, BadCall):
        assert reply.content == f"Error: {call.reason}"
    else:
        with pytest.raises(ValueError, match="as arithmetic") as caught:
            calculator(call.arguments["expression"])
        assert reply.content == f"Error: ValueError: {caught.value}"


def test_a_tool_call_survives_encoding_and_decoding_with_the_recipes_vocabulary() -> None:
    tokenizer = build_tokenizer()
    text = call_text(PROBLEM.expression)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text, "a parser must see the tags"
    assert {tokenizer.convert_ids_to_tokens(i) for i in ids} >= {WORDS[0], WORDS[1], '"expression"'}
