"""Advisories: plain sentences on what a run's recorded metrics say, with the evidence and the key to turn.

history.py  metrics by name, filled line by line
rules.py    the rules and their thresholds; pure functions
gather.py   what the rules need, read from a run directory
"""
