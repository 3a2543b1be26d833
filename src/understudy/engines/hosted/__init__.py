"""Engines in processes of their own: the process, its HTTP application and the client."""
