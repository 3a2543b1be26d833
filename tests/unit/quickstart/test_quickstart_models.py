"""The shipped models load with transformers alone, share one vocabulary, and have the intended accuracies."""

import json

import pytest
import torch
from make_models import SCHEDULES, build_model
from sft import SupervisedSchedule, accuracy, greedy_answers, train
from task import Problem, addition, make_splits
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from vocabulary import build_tokenizer

from understudy.assets import QUICKSTART, QUICKSTART_MODELS, quickstart_model

GRADED = 64
"""Test problems per domain: few enough to take seconds, enough to distinguish 40 % from 98 %."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(quickstart_model("student"))


@pytest.fixture(scope="module")
def models() -> dict[str, PreTrainedModel]:
    return {name: AutoModelForCausalLM.from_pretrained(quickstart_model(name)) for name in QUICKSTART_MODELS}


@pytest.fixture(scope="module")
def held_out() -> dict[str, list[Problem]]:
    return {domain: splits.test[:GRADED] for domain, splits in make_splits().items()}


def test_a_question_renders_to_the_expected_ids(tokenizer: PreTrainedTokenizerBase) -> None:
    chat = [{"role": "user", "content": "12+34="}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text == "<bos><user>12+34=<assistant>"
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert ids == [1, 4, 7, 8, 42, 9, 10, 43, 5]
    assert tokenizer.convert_ids_to_tokens(ids) == ["<bos>", "<user>", *"12+34=", "<assistant>"]


def test_an_answered_chat_ends_in_eos(tokenizer: PreTrainedTokenizerBase) -> None:
    chat = [{"role": "user", "content": "dbca="}, {"role": "assistant", "content": "abcd"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<bos><user>dbca=<assistant>abcd<eos>"
    with pytest.raises(Exception, match="roles user and assistant, not system"):
        tokenizer.apply_chat_template([{"role": "system", "content": "a"}], tokenize=False)


def test_every_character_survives_encoding_and_decoding(tokenizer: PreTrainedTokenizerBase) -> None:
    every_character = "0123456789abcdefghijklmnopqrstuvwxyz+="
    ids = tokenizer.encode(every_character)
    assert len(ids) == len(set(ids)) == len(every_character)
    assert tokenizer.decode(ids) == every_character
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == every_character
    assert tokenizer.encode("A") == [tokenizer.unk_token_id]


def test_student_and_teachers_share_one_vocabulary(tokenizer: PreTrainedTokenizerBase) -> None:
    for name in QUICKSTART_MODELS:
        folder = quickstart_model(name)
        for file in TOKENIZER_FILES:
            assert (folder / file).read_bytes() == (quickstart_model("student") / file).read_bytes()
        config = json.loads((folder / "config.json").read_text())
        assert config["vocab_size"] == len(tokenizer) == len(tokenizer.get_vocab())
        for special in ("pad", "bos", "eos"):
            assert config[f"{special}_token_id"] == getattr(tokenizer, f"{special}_token_id")
            generation = json.loads((folder / "generation_config.json").read_text())
            assert generation[f"{special}_token_id"] == config[f"{special}_token_id"]
    assert len({tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id}) == 3


def test_the_script_builds_the_shipped_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    assert build_tokenizer().get_vocab() == tokenizer.get_vocab()
    assert build_tokenizer().chat_template == tokenizer.chat_template


@pytest.mark.parametrize("domain", ["add", "sort"])
def test_each_teacher_is_expert_in_its_domain_only(
    domain: str, models: dict, tokenizer: PreTrainedTokenizerBase, held_out: dict[str, list[Problem]]
) -> None:
    other = {"add": "sort", "sort": "add"}[domain]
    teacher = models[f"teacher-{domain}"]
    assert accuracy(teacher, tokenizer, held_out[domain]) >= 0.98
    assert accuracy(teacher, tokenizer, held_out[other]) < 0.4


@pytest.mark.parametrize("domain", ["add", "sort"])
def test_the_student_is_weak_but_its_answers_have_the_right_kind_of_characters(
    domain: str, models: dict, tokenizer: PreTrainedTokenizerBase, held_out: dict[str, list[Problem]]
) -> None:
    problems = held_out[domain]
    assert accuracy(models["student"], tokenizer, problems) < 0.4
    written = greedy_answers(models["student"], tokenizer, problems)
    alike = [str.isdigit(text) if domain == "add" else str.isalpha(text) for text in written]
    assert sum(alike) >= 0.9 * len(problems)


def test_the_quickstart_assets_take_less_than_10_mb_and_models_are_float32(models: dict) -> None:
    size = sum(path.stat().st_size for path in QUICKSTART.rglob("*") if path.is_file())
    assert size <= 10_000_000
    for model in models.values():
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_training_twice_gives_the_same_weights() -> None:
    tokenizer = build_tokenizer()
    problems = {"add": [addition(left, 57) for left in range(10, 60)]}
    schedule = SupervisedSchedule(steps=3, rows={"add": 8}, seed=5)

    def weights() -> list[torch.Tensor]:
        model = build_model(tokenizer, schedule.seed)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        train(model, tokenizer, problems, schedule)
        after = [parameter.detach() for parameter in model.parameters()]
        assert all(not torch.equal(old, new) for old, new in zip(before, after, strict=True))
        return after

    assert all(torch.equal(first, second) for first, second in zip(weights(), weights(), strict=True))


def test_every_model_has_a_schedule() -> None:
    assert tuple(SCHEDULES) == QUICKSTART_MODELS
