"""Clears the cache of syntax trees after each test module, because they are large."""

from collections.abc import Iterator

import pytest
from sources import nodes


@pytest.fixture(scope="module", autouse=True)
def trees_of_one_module() -> Iterator[None]:
    yield
    nodes.cache_clear()
