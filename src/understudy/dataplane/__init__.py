"""Rows by key, columns by name, leases and acks.

base.py      the vocabulary and the `DataPlane` protocol: start here
embedded.py  memory with a crash-safe journal in the run directory
ledger.py    the accounting of a run, read from its journal alone: `audit(RUN)`
groups.py    policies and filters for the n sessions of a prompt
transfer_queue.py  the same ledger, columns in the memory of a Ray cluster (needs the `ray` extra)
bridge.py    `@bridged`: functions on columns that may be called with the names of rows; bridge_elsewhere.py: in another process
"""
