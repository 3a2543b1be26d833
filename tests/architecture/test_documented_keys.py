"""Recipe keys and variables that were missing in the docs are named on a page."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = "\n".join(page.read_text() for page in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))])


@pytest.mark.parametrize(
    "name",
    [
        "student.lora.alpha", "student.lora.targets", "data.shuffle", "trainer.warmup_steps", "trainer.grad_clip",
        "trainer.weight_decay", "trainer.schedule", "loss.clip_low", "loss.dual_clip", "cluster.start_timeout_seconds",
        "WANDB_PROJECT", "WANDB_ENTITY",
    ],
)  # fmt: skip
def test_the_key_or_variable_is_named_on_a_page(name: str) -> None:
    assert re.search(rf"`{re.escape(name)}\b", PAGES)
