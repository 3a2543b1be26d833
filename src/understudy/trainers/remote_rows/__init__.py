"""Rows that workers on other machines write themselves."""
