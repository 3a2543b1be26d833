"""Scripts in recipes/ and benchmarks/ are programs, not packages. Their folders go to the end of the path: other recipes have a
make_models.py as well, and that name is theirs."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path += [str(ROOT / folder) for folder in ("recipes/word-problems", "recipes/gsm8k", "benchmarks/study")]
