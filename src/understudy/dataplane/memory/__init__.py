"""Rows in memory: what can be claimed, leases, limits."""
