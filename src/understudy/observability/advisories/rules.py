"""The rules: each reads recorded metrics and yields advisories. Pure; thresholds are named and documented.

Trends compare the median of the first `WINDOW` steps with the median of the last; a run shorter than two
windows has no trend. docs/view.md has the table of rules with the reason for each threshold.
"""

from __future__ import annotations

from understudy.observability.advisories import learning, operation
from understudy.observability.advisories.facts import Advisory, RunFacts

RULES = learning.RULES + operation.RULES


def advise(facts: RunFacts) -> list[Advisory]:
    """All findings, warnings first, else in the order of the rules."""
    found = [advisory for one in RULES for advisory in one(facts)]
    return sorted(found, key=lambda advisory: advisory.level != "warning")
