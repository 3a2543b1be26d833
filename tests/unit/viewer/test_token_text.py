"""The text pieces of tokens join to the decoded text, also with split characters; without a tokenizer ids are shown."""

from pathlib import Path

import pytest
from recorded_run import QUICKSTART
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from understudy.viewer.token_text import TokenText, find_tokenizer


@pytest.fixture
def bytes_tokenizer(tmp_path: Path) -> Path:
    """A byte-level tokenizer with one token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({sign: i for i, sign in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


@pytest.mark.parametrize("text", ["plain words", "naïve café €", "مرحبا \u202e x", "👩‍🚀 two\n\nlines"])
def test_the_pieces_of_tokens_join_to_the_decoded_text(bytes_tokenizer: Path, text: str) -> None:
    ids = Tokenizer.from_file(str(bytes_tokenizer)).encode(text).ids
    pieces = TokenText(bytes_tokenizer).pieces(ids)
    assert "".join(pieces) == text and len(pieces) == len(ids)


def test_the_students_tokenizer_is_found_and_special_tokens_are_text(tmp_path: Path) -> None:
    text = TokenText(find_tokenizer(tmp_path, str(QUICKSTART / "models" / "student")))
    assert text.found and "<" in text.text([0, 1, 2])


def test_without_a_tokenizer_ids_are_shown(tmp_path: Path) -> None:
    text = TokenText(find_tokenizer(tmp_path, "nobody/nothing"))
    assert not text.found and text.pieces([5, 6]) == ["⟨5⟩", "⟨6⟩"] and text.one(7) == "⟨7⟩"


def test_a_damaged_tokenizer_is_treated_as_missing(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    assert not TokenText(tmp_path / "tokenizer.json").found
