"""Advisories: plain sentences on what a run's recorded metrics say, with the evidence and the key to turn.

history.py    metrics by name, filled line by line
facts.py      what a rule reads and what it yields
learning.py   rules on what the student learns, and their thresholds; pure functions
operation.py  rules on how the run runs; pure functions
rules.py      all rules, and the order of what they find
gather.py     what the rules need, read from a run directory
"""
