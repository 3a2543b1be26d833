"""Rewind of the journal to a checkpoint, and deletion of what no checkpoint needs.

The trainer's order of writes is: train step s, `ack(lease, s)`, … , save the checkpoint of s. After a crash
it resumes from the newest whole checkpoint c and calls `rewind(c)`.

**Why nothing is trained twice.** The weights of c were trained on exactly the rows acked with step ≤ c: an
ack of step s is committed before the checkpoint of s can exist. `rewind(c)` revokes every ack later than c;
the weights have not seen those rows. Rows that stay acked are in the weights, and a settled key cannot be
issued, written or claimed.

**Why nothing is lost.** A row leaves the journal only when its trained step is settled, or with a dead-letter
or evict record in the same transaction. So after `rewind` every issued key is trained ≤ c, dead, evicted, or
a row in flight: complete, or rolled out and waiting for scores, or `pending` and to be made again under the
same key and therefore the same seed.

**Why kill -9 between any two writes is safe.** Every operation is one transaction, and the order of transactions
is the order of calls; a crash keeps a prefix of them.
- before the commit of `issue`: the row does not exist; the trainer's cursor (in its checkpoint) issues it again.
- between `issue` and `put`: the row is `pending`; it is made again.
- between `put` of the rollout and `put` of the scores: the row is finished without them; only scoring is repeated.
- between claim and `ack`: leases are in memory only, so the row is free again; its step is not in any checkpoint.
- between `ack(s)` and the checkpoint of s: `rewind(c)` with c < s revokes the ack.
- inside `rewind` or `settle`: nothing is committed; the next start calls `rewind(c)` again. It is idempotent.
- between a dead-letter commit and its line in the jsonl file: the file is rewritten from the ledger at each start.

With `keep_rows=False` (determinism "full") rows issued for steps after c are deleted, whatever their state,
so that the run repeats from c as if it had never crashed. Rows issued for steps ≤ c keep their state, because
the trainer's cursor at c is past them and will not issue them again.
"""

from __future__ import annotations

import sqlite3

from understudy.dataplane.journal.schema import PACK_SHIFT, delete_rows, read_meta, write_meta
from understudy.errors import DataPlaneError
from understudy.observability.faults import point

_UNTRAIN = """
INSERT INTO events(kind, sign, partition, step, detail, keys)
SELECT 'trained', -1, partition, step, 'rewind', json_group_array(key) FROM (
    SELECT partition, step, key FROM facts WHERE kind = 'trained' AND step > :step
    GROUP BY partition, step, key HAVING SUM(sign) > 0)
GROUP BY partition, step
"""
_REVIVE = f"""
UPDATE rows SET trained = NULL, status = CASE
    WHEN EXISTS (SELECT 1 FROM packs WHERE id >= rows.id << {PACK_SHIFT} AND id < (rows.id + 1) << {PACK_SHIFT})
    THEN status ELSE 'pending' END
WHERE trained > :step
"""
_FORGOTTEN = """
CREATE TEMP TABLE forgotten AS
SELECT partition, key FROM facts WHERE kind = 'issued' AND step > :step
GROUP BY partition, key HAVING SUM(sign) > 0
EXCEPT
SELECT partition, key FROM facts WHERE kind = 'trained' GROUP BY partition, key HAVING SUM(sign) > 0
"""
_FORGET_EVENTS = """
INSERT INTO events(kind, sign, partition, step, detail, keys)
SELECT kind, -1, partition, step, 'rewind', json_group_array(key) FROM (
    SELECT kind, partition, step, key FROM facts
    WHERE (partition, key) IN (SELECT partition, key FROM forgotten)
    GROUP BY kind, partition, step, key HAVING SUM(sign) > 0)
GROUP BY kind, partition, step
"""


def check(connection: sqlite3.Connection, step: int) -> None:
    """Raise for a rewind to before the settled step: the rows it would need are deleted."""
    settled = read_meta(connection, "settled", -1)
    if step < settled:
        raise DataPlaneError(
            f"cannot rewind to step {step}: settle({settled}) said no checkpoint before it would be used; "
            f"resume from step {settled} or later"
        )


def rewind(connection: sqlite3.Connection, step: int, keep_rows: bool) -> None:
    """Restore, in one transaction, the journal as of the checkpoint of `step`; with `keep_rows`, keep later
    rows."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        connection.execute(_UNTRAIN, {"step": step})
        connection.execute(_REVIVE, {"step": step})
        if not keep_rows:
            connection.execute("DROP TABLE IF EXISTS temp.forgotten")
            connection.execute(_FORGOTTEN, {"step": step})
            connection.execute(_FORGET_EVENTS)
            gone = connection.execute(
                "SELECT id FROM rows WHERE step > ? AND trained IS NULL", (step,)
            ).fetchall()
            delete_rows(connection, [row_id for (row_id,) in gone])
            connection.execute("DROP TABLE temp.forgotten")
        write_meta(connection, "epoch", read_meta(connection, "epoch", 0) + 1)
        point("rewind.before_commit")
        connection.execute("COMMIT")
        point("rewind.after_commit")
    except BaseException:
        if connection.in_transaction:  # after a failed write SQLite has rolled back itself
            connection.execute("ROLLBACK")
        raise


def settle(connection: sqlite3.Connection, step: int) -> None:
    """Delete the columns and `rows` entries of rows trained in steps ≤ `step`; their ledger events stay."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        done = connection.execute("SELECT id FROM rows WHERE trained <= ?", (step,)).fetchall()
        delete_rows(connection, [row_id for (row_id,) in done])
        write_meta(connection, "settled", max(step, read_meta(connection, "settled", -1)))
        point("settle.before_commit")
        connection.execute("COMMIT")
        point("settle.after_commit")
    except BaseException:
        if connection.in_transaction:  # after a failed write SQLite has rolled back itself
            connection.execute("ROLLBACK")
        raise
