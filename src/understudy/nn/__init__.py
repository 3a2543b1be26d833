"""Arithmetic that engines, teachers and the policy share."""
