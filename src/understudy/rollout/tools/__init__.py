"""Tools a model can call. They run in a child process with a deadline, limits and no network, never in ours.

base         what a tool is, and what came of calling it
sandbox      starts the child and reads its answer;  jail  is the program the child runs
library      the tools that ship (calculator, python), and a user's own functions
"""
