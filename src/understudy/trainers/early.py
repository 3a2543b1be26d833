"""What a run begins before the trainer has imported torch, which takes seconds itself."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager, nullcontext

from understudy.cluster import nursery
from understudy.config import Recipe


def begun_early(recipe: Recipe) -> AbstractContextManager[None]:
    """A nursery for the teachers this run will start on this machine, if there are any."""
    own = [teacher for teacher in recipe.teachers.values() if not teacher.urls]
    if recipe.cluster.backend != "local" or not own:
        return nullcontext()
    threads = Counter(teacher.threads for teacher in own).most_common(1)[0][0]
    return nursery.prepared({"OMP_NUM_THREADS": str(threads)})
