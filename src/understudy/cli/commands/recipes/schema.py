"""Print the JSON schema of recipes, with which editors complete keys and show what they mean.

Save it beside a recipe (`understudy schema > recipe.schema.json`) and name it in the recipe's first line:
`#:schema recipe.schema.json`.
"""

from __future__ import annotations

import argparse
import sys

from understudy.config.schema import schema_text

EXAMPLE = "understudy schema"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(options: argparse.Namespace) -> None:
    sys.stdout.write(schema_text())
