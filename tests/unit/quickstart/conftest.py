"""The scripts in recipes/quickstart run as programs, not as a package; the tests import them the way they import each other."""

import sys
from pathlib import Path

import pytest

RECIPE = Path(__file__).resolve().parents[3] / "recipes" / "quickstart"
sys.path.insert(0, str(RECIPE))


@pytest.fixture
def recipe_folder() -> Path:
    return RECIPE
