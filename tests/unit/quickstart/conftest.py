"""The scripts in recipes/quickstart are programs, not a package. Tests import them by name, as they import each other."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "recipes" / "quickstart"))
