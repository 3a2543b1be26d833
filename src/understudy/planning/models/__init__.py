"""Reads models' small files before anything is loaded: context, tokens, compatible pairs."""
