"""Clients of teacher servers: the native protocol and OpenAI-compatible completions."""
