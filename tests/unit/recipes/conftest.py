"""Scripts in recipes/ and benchmarks/ are programs, not packages. Their folders are appended to the
path, because other recipes have a make_models.py too, which must be found first."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path += [str(ROOT / folder) for folder in ("recipes/word-problems", "recipes/gsm8k", "benchmarks/study")]
