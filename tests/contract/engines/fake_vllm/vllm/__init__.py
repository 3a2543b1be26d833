"""Stands in for vLLM where its start would take a minute."""
