"""The age of trained rows in publishes: checked against the bound, and measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from understudy.dataplane.base import DataPlane, Lease
from understudy.dataplane.transfer_queue.bridge import ColumnDict, bridged, bridging
from understudy.errors import DataPlaneError
from understudy.planning.windows import Windows
from understudy.trainers.row_columns import SIZES, VERSION


@dataclass(frozen=True, slots=True)
class RowAges:
    """The ages of one batch's rows."""

    keys: tuple[str, ...]
    ages: tuple[int, ...]
    """Publishes between the oldest weights that wrote a token of the row and the weights it trains."""
    spans: tuple[int, ...]
    """Publishes between the oldest and the newest weights that wrote the row: above 0 for a partial
    rollout."""

    @staticmethod
    async def of(plane: DataPlane, lease: Lease, windows: Windows, step: int) -> RowAges:
        with bridging(plane):
            ages, spans = await _ages_and_spans(lease, windows, step)
        return RowAges(tuple(lease.meta.keys), ages, spans)

    def check(self, bound: int) -> None:
        """Raises for a row older than `bound`. The bound holds by construction, so such a row means a fault
        in the trainer."""
        for key, age in zip(self.keys, self.ages, strict=True):
            if age > bound:
                raise DataPlaneError(
                    f"row {key} was written {age} publishes ago, more than the {bound} that trainer.max_staleness allows; "
                    "this is a fault of the trainer, please report it with the run directory"
                )

    def metrics(self, row_losses: Sequence[float], row_tokens: Sequence[int]) -> dict[str, float]:
        """A histogram of ages, the loss per age, and how many rows were written by several versions."""
        count = Counter(self.ages)
        metrics = {
            "async/staleness/mean": sum(self.ages) / len(self.ages),
            "async/staleness/max": float(max(self.ages)),
            "async/partial_rollouts": float(sum(span > 0 for span in self.spans)),
            "async/partial_span/max": float(max(self.spans)),
        }
        for age in sorted(count):
            rows = [i for i, own in enumerate(self.ages) if own == age]
            tokens = sum(row_tokens[i] for i in rows)
            metrics[f"async/staleness/rows/{age}"] = float(len(rows))
            metrics[f"async/loss/age/{age}"] = sum(row_losses[i] for i in rows) / max(tokens, 1)
        return metrics


@dataclass(frozen=True, slots=True)
class ScoredVersions:
    """Which weights of a teacher that follows the student scored one batch's rows."""

    keys: tuple[str, ...]
    versions: tuple[int, ...]
    """−1 for a row that a frozen teacher scored."""

    @staticmethod
    async def of(plane: DataPlane, lease: Lease) -> ScoredVersions:
        with bridging(plane):
            return ScoredVersions(tuple(lease.meta.keys), await _versions(lease))

    def check(self, windows: Windows, step: int, lag: int) -> None:
        """Raises for a row whose teacher was further behind than a row may be, and `lag` more. A row is scored
        after it was written and before it is trained, so the bound of rows holds for its scores too."""
        bound = windows.oldest + lag
        for key, version in zip(self.keys, self.versions, strict=True):
            age = windows.age(version, step)
            if version >= 0 and age > bound:
                raise DataPlaneError(
                    f"row {key} was scored by weights of {age} publishes ago, more than the {bound} that trainer.max_staleness "
                    "and teachers.*.version allow; this is a fault of the trainer, please report it with the run directory"
                )

    @property
    def metrics(self) -> dict[str, float]:
        known = [version for version in self.versions if version >= 0]
        if not known:
            return {}
        return {
            "rollout/teacher_version/min": float(min(known)),
            "rollout/teacher_version/max": float(max(known)),
        }


# `bridged`: called with a lease, they read the named columns of its rows from the plane of `bridging`.
@bridged(VERSION)
async def _versions(columns: ColumnDict) -> tuple[int, ...]:
    found: Any = columns[VERSION]
    return tuple(int(version) for version in found)


@bridged(SIZES)
async def _ages_and_spans(
    columns: ColumnDict, windows: Windows, step: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    ages, spans = [], []
    sizes: Any = columns[SIZES]
    for row in sizes:
        oldest, newest = row["oldest"], row["newest"]
        # A row of which no token was generated (−1) has no age.
        ages.append(max(0, windows.age(oldest, step)) if oldest >= 0 else 0)
        spans.append(windows.published_at(newest) - windows.published_at(oldest))
    return tuple(ages), tuple(spans)
