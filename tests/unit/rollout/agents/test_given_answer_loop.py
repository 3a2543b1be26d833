"""Given answers (`rollout.off_policy`): their tokens, their end, refused rows, and which sessions take them."""

import asyncio
from typing import Any

import numpy as np
import pytest
from chat_tokenizers import ENDS, chat_tokenizer

from understudy.engines.base import Sampling
from understudy.errors import DataError
from understudy.rollout.agents.agent import LoopContext
from understudy.rollout.agents.given import GivenAnswer, takes_given_answer
from understudy.rollout.render import Renderer
from understudy.types.prompt import Prompt
from understudy.types.trajectory import Origin, StopReason, Trajectory

TOKENIZER = chat_tokenizer("chatml")
END = TOKENIZER.eos_token_id
ANSWER = {"role": "assistant", "content": "seven"}


def given(
    columns: dict[str, Any], most: int = 32, context: int = 64, stops: tuple[int, ...] = (END,)
) -> Trajectory:
    async def generate(*_: Any) -> Any:
        raise AssertionError("the engine was asked although the answer is given")

    renderer = Renderer(TOKENIZER, context=context)
    loop = LoopContext(generate, renderer, Sampling(most, stops), "00000-0000003", 2, context, given="answer")
    prompt = Prompt("00000-0000003", 3, 0, "add", text="3 + 4 =", columns=columns)
    (found,) = asyncio.run(GivenAnswer().run(prompt, loop))
    return found


def test_a_given_answer_row_is_prompt_then_answer_then_end_token() -> None:
    found = given({"answer": "seven"})
    prompt = TOKENIZER.encode("3 + 4 =", add_special_tokens=False)
    answer = [*TOKENIZER.encode("seven", add_special_tokens=False), END]
    assert found.tokens[found.loss_mask].tolist() == answer
    assert found.tokens[~found.loss_mask].tolist()[-len(prompt) :] == prompt
    assert found.key == "00000-0000003_2_0" and found.origin is Origin.DATA
    assert found.stop_reason is StopReason.EOS
    assert np.isnan(found.behaviour_logprobs).all() and set(found.weight_versions.tolist()) == {-1}


@pytest.mark.parametrize(
    "content", ["seven", [{"type": "text", "text": "sev"}, {"type": "text", "text": "en"}]]
)
def test_an_answer_given_as_a_message_is_read_as_its_text(content: Any) -> None:
    found = given({"answer": [{"role": "assistant", "content": content}]})
    assert found.tokens.tolist() == given({"answer": "seven"}).tokens.tolist()


def test_a_given_answer_is_cut_at_max_new_tokens_and_at_the_context() -> None:
    whole = given({"answer": "one two three four five six seven"}, most=64)
    cut = given({"answer": "one two three four five six seven"}, most=3)
    assert cut.loss_length == 3 and cut.stop_reason is StopReason.LENGTH
    assert cut.tokens.tolist() == whole.tokens[: cut.length].tolist()
    full = given({"answer": "one two three four five six seven"}, most=64, context=whole.length - 2)
    assert full.length == whole.length - 2 and full.stop_reason is StopReason.LENGTH


def test_a_given_answer_ends_with_the_eos_token_or_else_the_first_stop_token() -> None:
    assert given({"answer": "7"}, stops=(5, 6)).tokens[-1] == 5
    assert given({"answer": "7"}, stops=(5, END)).tokens[-1] == END


@pytest.mark.parametrize("family", ENDS)
def test_a_given_answer_in_a_chat_ends_with_the_templates_end_token_if_it_is_a_stop_token(
    family: str,
) -> None:
    tokenizer = chat_tokenizer(family)
    end, eos = tokenizer.convert_tokens_to_ids(ENDS[family]), tokenizer.eos_token_id

    def last(stops: tuple[int, ...], **content: Any) -> int:
        sampling = Sampling(32, stops)
        context = LoopContext(
            generate=None,  # type: ignore[arg-type]
            renderer=Renderer(tokenizer, context=128),
            sampling=sampling,
            prompt_key="k",
            session=0,
            context=128,
            given="answer",
        )
        asked = Prompt("k", 0, 0, "", columns={"answer": "7"}, **content)
        (found,) = asyncio.run(GivenAnswer().run(asked, context))
        return int(found.tokens[-1])

    chat = ({"role": "user", "content": "3 + 4"},)
    assert last((eos, end), messages=chat) == end
    assert last((eos,), messages=chat) == eos, "the template's end token is not a stop token"
    assert last((eos, end), text="3 + 4 =") == eos, "a plain prompt has no template"


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({}, "is missing or empty"),
        ({"answer": ""}, "is missing or empty"),
        ({"answer": 7}, "is a int; expected text"),
        ({"answer": [{"role": "user", "content": "7"}]}, "is a list without an assistant message"),
        ({"answer": [ANSWER, ANSWER]}, "is 2 messages, expected one"),
        ({"answer": [{**ANSWER, "tool_calls": [{}]}]}, "is a message with tool calls"),
        ({"answer": [{**ANSWER, "content": [{"type": "image"}]}]}, "is a message that is not text alone"),
    ],
)
def test_a_row_without_a_usable_answer_raises_a_data_error_that_names_it(
    columns: dict[str, Any], message: str
) -> None:
    with pytest.raises(
        DataError, match=f"00000-0000003: rollout.off_policy .* column 'answer', which {message}"
    ):
        given(columns)


def test_which_sessions_take_the_given_answer_depends_only_on_seed_prompt_and_session() -> None:
    def drawn(seed: int, share: float) -> list[bool]:
        prompts = [Prompt(f"{i % 3:05d}-{i:07d}", i, i % 3, "add", text="x") for i in range(2000)]
        return [takes_given_answer(seed, one, session, share) for one in prompts for session in range(2)]

    assert drawn(0, 0.2) == drawn(0, 0.2) != drawn(1, 0.2)
    assert np.mean(drawn(0, 0.2)) == pytest.approx(0.2, abs=0.02)
    assert not any(drawn(0, 0.0)) and all(drawn(0, 1.0))
    few, many = drawn(0, 0.2), drawn(0, 0.5)
    assert all(more for less, more in zip(few, many, strict=True) if less), "a larger share only adds rows"
