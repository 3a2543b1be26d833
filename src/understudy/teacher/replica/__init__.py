"""The replica process: server, queue, tensor parallelism."""
