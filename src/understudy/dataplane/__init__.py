"""Rows by key, columns by name, leases and acks.

base.py      the vocabulary and the `DataPlane` protocol: start here
embedded.py  memory with a crash-safe journal in the run directory
ledger.py    the accounting of a run, read from its journal alone: `audit(RUN)`
groups.py    policies and filters for the n sessions of a prompt
memory/      the state of the embedded plane: rows, leases, claims, admission
journal/     the SQLite journal, spill files, rewind
transfer_queue/  the same ledger, columns in the memory of a Ray cluster (needs the `ray` extra);
             its bridge.py has `@bridged`: functions on columns that can be called with row names
"""
