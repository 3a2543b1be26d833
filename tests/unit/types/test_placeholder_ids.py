"""The ids that a run may use."""

import numpy as np

from understudy.types.usable_ids import UsableIds


def test_a_placeholder_beyond_the_limit_makes_no_other_id_usable() -> None:
    """A teacher may lack the last tokens of a student that reads pictures, and the placeholder is one of them."""
    ids = UsableIds(5, holes=(2,)).without((7,))
    never = [place for place in range(9) if ids.first_unusable(np.array([place])) is not None]
    assert never == [2, 5, 6, 8] and ids.placeholders == (7,)
    assert ids.count == 4 and ids.without((3,)).count == 3
