"""Messages to ranks that fetch rows themselves name the write of each column, in few bytes."""

import json
from typing import Any

from understudy.policy.ranks.wire import batch_by_names, name_columns, pack, unpack
from understudy.types.batch import BatchMeta
from understudy.types.batch_ref import RemoteBatch

FIELDS = ("tokens", "loss_mask", "teacher_ids", "reward")


def test_write_marks_of_a_remote_batch_reach_ranks_and_are_sent_once_for_columns_that_share_them() -> None:
    source: Any = object()
    rows = tuple(f"{number:05d}-0000017_3_0" for number in range(64))
    made, scored = (tuple(f"{life}.{number}" for number in range(64)) for life in ("5f0c2a", "77aa01"))
    marks = {"tokens": made, "loss_mask": made, "teacher_ids": scored}
    origins = ("student", "data") * 32
    batch = RemoteBatch(
        BatchMeta("train", rows, FIELDS, marks=marks), (9,) * 64, (4,) * 64, source, origins=origins
    )
    head, tensors = unpack(pack(*name_columns(batch, batch.meta)))
    received, _ = batch_by_names(head, tensors, source)
    assert received.meta == batch.meta and received.origins == origins
    assert len(json.dumps(head)) < 90 * 64
