"""Clients of inference servers: vLLM, SGLang and OpenAI-compatible ones."""
