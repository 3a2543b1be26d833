"""Every recipe of the study passes `understudy check` once its data and models are there."""

import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from prepare import prepare
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from word_problems import make_splits, write_splits

from understudy.cli.main import main
from understudy.config import load_recipe

ROOT = Path(__file__).resolve().parents[3]
TASKS = ("word-problems", "gsm8k")
METHODS = ("forward-kl", "grpo", "grpo-opd", "k1", "reverse-kl")
TEMPLATE = "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' ' }}{% endfor %}assistant "


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with the files and the kind of tokenizer that SmolLM2's has."""
    folder = tmp_path_factory.mktemp("model")
    inner = Tokenizer(WordLevel({"<unk>": 0, "<bos>": 1, "<eos>": 2}, unk_token="<unk>"))
    inner.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", bos_token="<bos>", eos_token="<eos>", pad_token="<eos>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    LlamaConfig(vocab_size=64, max_position_embeddings=8192, bos_token_id=1, eos_token_id=2).save_pretrained(
        folder
    )
    save_file({"weight": torch.zeros(1)}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The files of both tasks: generated word problems, and invented rows with the columns of GSM8K."""
    problems, maths = tmp_path_factory.mktemp("words"), tmp_path_factory.mktemp("gsm8k")
    write_splits(make_splits(sizes={"test": 10, "valid": 5, "make": 10, "train": 200}), problems)
    rows = [
        {"question": f"Ann has {n} pears and buys 2 more. How many?", "answer": f"{n}+2=<<{n}+2={n + 2}>>{n + 2}\n#### {n + 2}"}
        for n in range(20)
    ]  # fmt: skip
    for name in ("raw-train", "raw-test"):
        (maths / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert prepare(maths / "raw-train.jsonl", maths / "raw-test.jsonl", maths, valid=5) == {
        "train": 15,
        "make": 15,
        "valid": 5,
        "test": 20,
    }
    return {"word-problems": problems, "gsm8k": maths}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("method", METHODS)
def test_check_accepts_each_recipe_of_the_study(
    task: str, method: str, model: Path, data: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = ROOT / "recipes" / task / f"{method}.toml"
    arguments = [f"student.model={model}", f"data.train={data[task] / 'train.jsonl'}"]
    arguments += [f"data.eval={data[task] / 'test.jsonl'}"]
    arguments += [f"teachers.teacher.model={model}"] if method != "grpo" else []
    assert main(["check", str(recipe), *arguments]) == 0, capsys.readouterr()
    assert "the recipe is sound" in capsys.readouterr().out


@pytest.mark.parametrize("task", TASKS)
def test_recipes_of_a_task_differ_only_in_the_loss(task: str) -> None:
    """Same student, prompts, samples of a step, lengths, steps and measurements."""
    recipes = [load_recipe(ROOT / "recipes" / task / f"{method}.toml") for method in METHODS]
    alike = {
        (
            one.student.model,
            tuple(one.data.train),
            tuple(one.data.eval or ()),
            one.data.reward,
            one.trainer.batch_size * one.rollout.n,
            one.rollout.max_new_tokens,
            one.rollout.temperature,
            one.trainer.steps,
            one.trainer.eval_every,
        )
        for one in recipes
    }
    assert len(alike) == 1
    assert len({one.loss for one in recipes}) == len(METHODS)


def test_prepared_gsm8k_rows_have_no_annotations_and_keep_the_answer(data: dict[str, Path]) -> None:
    rows = [json.loads(line) for line in (data["gsm8k"] / "valid.jsonl").read_text().splitlines()]
    assert rows[-1]["answer"] == "19+2=21\n#### 21"
    train = (data["gsm8k"] / "train.jsonl").read_text().splitlines()
    assert not {json.dumps(row) for row in rows} & set(train)


def test_gsm8k_rows_with_other_columns_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "?"}\n')
    with pytest.raises(SystemExit, match="line 1: has \\['prompt'\\]; expected `question` and `answer`"):
        prepare(tmp_path / "train.jsonl", tmp_path / "train.jsonl", tmp_path / "out")


def test_a_model_with_dropped_layers_keeps_the_outer_layers_and_generates() -> None:
    sys.path.insert(0, str(ROOT / "recipes" / "word-problems"))
    known = sys.modules.pop("make_models", None)
    try:
        from make_models import cut, kept_layers
    finally:
        sys.path.pop(0)
        sys.modules.pop("make_models", None)
        if known is not None:
            sys.modules["make_models"] = known
    stay = kept_layers(30, 20)
    assert len(stay) == 20 and stay[:5] == [0, 1, 2, 3, 4] and stay[-5:] == [25, 26, 27, 28, 29]
    assert all(after - before <= 2 for before, after in pairwise(stay))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=6, num_attention_heads=2
    )
    whole = LlamaForCausalLM(config).eval()
    kept = [whole.model.layers[index] for index in kept_layers(6, 4)]
    small = cut(whole, 4)
    assert list(small.model.layers) == kept and small.config.num_hidden_layers == 4
    written = small.generate(input_ids=torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False)
    cached = small(input_ids=written[:, :-1]).logits[:, -1].argmax(-1)
    assert cached.item() == written[0, -1].item()
