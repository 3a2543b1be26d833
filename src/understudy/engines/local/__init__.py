"""Decoding in this process: scheduler, key-value memory, sampling."""
