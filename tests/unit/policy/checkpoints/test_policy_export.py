"""A student is loaded from a model folder and exported to one that transformers loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from small_student import cross_entropy, gemma2, qwen3, settings, token_mean, varied_batch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessorPil,
    PreTrainedTokenizerFast,
)

from understudy.errors import CheckpointError, PolicyError
from understudy.policy.checkpoints.checkpoint import CheckpointStore
from understudy.policy.checkpoints.export import export, model_card
from understudy.policy.load import context_length, load_student, resolve_dtype
from understudy.policy.policy import Policy


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_base(tmp_path / "base")


def save_base(folder: Path) -> Path:
    model = qwen3()
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    inner = Tokenizer(WordLevel({f"w{index}": index for index in range(23)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="w2", pad_token="w0").save_pretrained(folder)
    return folder


def test_load_student_gives_a_model_without_dropout(base: Path) -> None:
    student = load_student(str(base), "float32", "cpu")
    assert student.context_length == 64 == context_length(student.model)
    assert student.tokenizer.eos_token_id == 2
    assert all(getattr(module, "attention_dropout", 0.0) == 0.0 for module in student.model.modules())
    ids = torch.arange(10)[None]
    assert torch.equal(student.model(ids).logits, student.model(ids).logits)
    assert torch.allclose(student.model(ids).logits, qwen3().eval()(ids).logits, atol=1e-6)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("/nowhere/model", "does not exist"),
        ("./nowhere", "does not exist"),
        ("{tmp}", "config.json is missing"),
        ("{tmp}/nowhere", "does not exist"),
    ],
)
def test_loading_a_missing_or_incomplete_folder_is_refused(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        load_student(source.format(tmp=tmp_path))


def test_pickled_weights_are_refused(base: Path) -> None:
    (base / "model.safetensors").unlink()
    torch.save(qwen3().state_dict(), base / "pytorch_model.bin")
    with pytest.raises(PolicyError, match="cannot be loaded"):
        load_student(str(base))


def test_remote_code_without_a_pinned_revision_is_refused() -> None:
    with pytest.raises(PolicyError, match="pin it with `revision`"):
        load_student("someone/model", trust_remote_code=True)


def test_a_model_with_capped_attention_is_loaded_with_eager_attention(base: Path, tmp_path: Path) -> None:
    gemma2().save_pretrained(tmp_path / "capped")
    for file in base.glob("tokenizer*"):
        (tmp_path / "capped" / file.name).write_bytes(file.read_bytes())
    assert load_student(str(tmp_path / "capped")).model.config._attn_implementation == "eager"
    assert load_student(str(base)).model.config._attn_implementation == "sdpa"


def test_an_unknown_dtype_is_refused() -> None:
    assert resolve_dtype("bfloat16") is torch.bfloat16
    with pytest.raises(PolicyError, match="expected one of float32"):
        resolve_dtype("fp8")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_exported_folder_holds_the_trained_student_its_tokenizer_and_a_model_card(
    base: Path, tmp_path: Path, dtype: str
) -> None:
    policy = Policy(load_student(str(base), dtype).model, settings())
    batch = varied_batch()
    policy.update(batch, cross_entropy, token_mean(batch))
    saved = CheckpointStore(tmp_path / "checkpoints").save(1, policy.state())
    card = {
        "student": str(base),
        "teachers": {"math": "/models/big", "code": "org/coder"},
        "step": 1,
        "data": "sha256:abc",
        "command": "understudy train recipe.toml",
        "versions": {"torch": "2"},
        "metrics": {"val/accuracy": 0.9512345678, "a|b": 1},
    }
    out = export(saved, base, tmp_path / "out" / "student", card)
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.dtype == resolve_dtype(dtype)
    trained = policy.model.state_dict()
    assert all(torch.equal(tensor, trained[name]) for name, tensor in loaded.state_dict().items())
    assert loaded.generation_config.eos_token_id == 2
    assert AutoTokenizer.from_pretrained(out).get_vocab() == AutoTokenizer.from_pretrained(base).get_vocab()
    readme = (out / "README.md").read_text()
    for word in (
        "math: big, code: org/coder",
        "sha256:abc",
        "understudy train recipe.toml",
        "| val/accuracy | 0.951235 |",
        "a\\|b",
    ):
        assert word in readme
    assert str(tmp_path) not in readme
    assert not any(file.suffix in (".bin", ".pt", ".pkl") for file in out.iterdir())


@pytest.mark.parametrize("out", [".", "link", "empty/"])
def test_export_fills_an_existing_empty_folder_in_place(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    """The folder is not replaced: it may be the shell's working directory, a link or a mounted volume."""
    saved = CheckpointStore(tmp_path / "checkpoints").save(
        0, Policy(load_student(str(base)).model, settings()).state()
    )
    empty = tmp_path / "here" / "empty"
    empty.mkdir(parents=True)
    (tmp_path / "here" / "link").symlink_to(empty)
    monkeypatch.chdir(empty if out == "." else empty.parent)
    before = empty.stat().st_ino
    assert export(saved, base, out, {}) == Path(out)
    assert empty.stat().st_ino == before and not [one for one in empty.iterdir() if one.name.startswith(".")]
    assert (empty / "README.md").read_text().splitlines()[-2:] == ["| | |", "|---|---|"]
    assert AutoModelForCausalLM.from_pretrained(empty).config.vocab_size == 23
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        export(saved, base, out, {})


def test_the_running_average_can_be_exported(base: Path, tmp_path: Path) -> None:
    policy = Policy(load_student(str(base)).model, settings(ema_decay=0.5))
    batch = varied_batch()
    policy.update(batch, cross_entropy, token_mean(batch))
    saved = CheckpointStore(tmp_path / "checkpoints").save(1, policy.state())
    loaded = AutoModelForCausalLM.from_pretrained(export(saved, base, tmp_path / "out", {}, averaged=True))
    averages = dict(policy.averaged_weights())
    assert all(torch.equal(parameter, averages[name]) for name, parameter in loaded.named_parameters())
    plain = CheckpointStore(tmp_path / "plain").save(
        0, Policy(load_student(str(base)).model, settings()).state()
    )
    with pytest.raises(CheckpointError, match="no average"):
        export(plain, base, tmp_path / "none", {}, averaged=True)


def test_export_refuses_a_folder_that_is_not_empty(base: Path, tmp_path: Path) -> None:
    saved = CheckpointStore(tmp_path / "checkpoints").save(
        0, Policy(load_student(str(base)).model, settings()).state()
    )
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="not empty"):
        export(saved, base, tmp_path / "out", {})
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["precious.txt"]
    (tmp_path / "empty").mkdir()
    assert (export(saved, base, tmp_path / "empty", {}) / "config.json").is_file()


def test_export_of_a_damaged_checkpoint_is_refused(base: Path, tmp_path: Path) -> None:
    saved = CheckpointStore(tmp_path / "checkpoints").save(
        0, Policy(load_student(str(base)).model, settings()).state()
    )
    (saved / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match="torn"):
        export(saved, base, tmp_path / "out", {})
    assert not (tmp_path / "out").exists()


def front_matter(card: str) -> dict[str, Any]:
    return yaml.safe_load(card.split("---")[1])


def test_the_model_card_names_the_base_model_and_the_data() -> None:
    data = {
        "prompts": ["org/prompts:train", "org/prompts:extra", "/home/me/own.jsonl"],
        "fingerprint": "ab12",
    }
    card = {
        "student": "Qwen/Qwen3-0.6B",
        "teachers": {"math": "Qwen/Qwen3-8B"},
        "data": data,
        "datasets": ["org/prompts"],
    }
    text = model_card(card, "mine")
    named = front_matter(text)
    assert named["base_model"] == "Qwen/Qwen3-0.6B" and named["base_model_relation"] == "finetune"
    assert named["datasets"] == ["org/prompts"] and "license" not in named
    for line in ("| Student (base model) | Qwen/Qwen3-0.6B |", "| Teachers | math: Qwen/Qwen3-8B |"):
        assert line in text
    assert "prompts: org/prompts:train, org/prompts:extra, own.jsonl, fingerprint: ab12" in text
    assert "/home/me" not in text
    assert front_matter(model_card(card, "mine", "peft"))["base_model_relation"] == "adapter"


def test_the_model_card_of_a_local_base_model_has_a_placeholder_for_its_hub_id() -> None:
    """The hub refuses a base_model that is not a hub id."""
    text = model_card({"student": "/home/me/models/student", "data": {"prompts": ["/d/rows.jsonl"]}}, "x")
    named = front_matter(text)
    assert "base_model" not in named and "datasets" not in named
    assert '# base_model: write the hub id of "student" here' in text and "/home/me" not in text


def test_the_model_card_escapes_markup() -> None:
    assert "<script" not in model_card({"student": "<script>alert(1)</script>"}, "x")


def gemma3_with_pictures(folder: Path) -> Path:
    """A vision-language model whose pictures are not supported: it trains on text alone."""
    save_base(folder)
    shape = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    text = {**shape, "vocab_size": 23, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64}
    config = Gemma3Config(
        text_config=text, vision_config={**shape, "image_size": 16, "patch_size": 4}, mm_tokens_per_image=4
    )
    model = Gemma3ForConditionalGeneration(config)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    image_processor = Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    image_processor.save_pretrained(folder)
    (folder / "processor_config.json").write_text('{"image_seq_length": 4}')
    return folder


def test_a_vision_language_model_that_trained_on_text_keeps_its_processor(tmp_path: Path) -> None:
    base = gemma3_with_pictures(tmp_path / "base")
    policy = Policy(load_student(str(base)).model, settings())
    saved = CheckpointStore(tmp_path / "checkpoints").save(1, policy.state())
    out = export(saved, base, tmp_path / "out", {})
    for name in ("preprocessor_config.json", "processor_config.json"):
        assert (out / name).read_bytes() == (base / name).read_bytes()
    AutoModelForImageTextToText.from_pretrained(out)
    AutoImageProcessor.from_pretrained(out, backend="pil")
