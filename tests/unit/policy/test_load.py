"""What loading a student does besides reading its files."""

from __future__ import annotations

import pytest
from small_runs import ASSETS

from understudy.policy.load import load_tokenizer


def test_a_text_longer_than_the_context_is_encoded_without_a_warning(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """transformers said that running it "will result in indexing errors"; a long tool result is cut before it is read."""
    tokenizer = load_tokenizer(str(ASSETS / "models" / "student"))
    assert len(tokenizer("12+34=" * 1000)["input_ids"]) > tokenizer.model_max_length
    assert "longer than" not in caplog.text + "".join(capfd.readouterr())
