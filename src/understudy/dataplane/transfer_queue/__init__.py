"""The data plane over TransferQueue, and functions bridged to its metas."""
