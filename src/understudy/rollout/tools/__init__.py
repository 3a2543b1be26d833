"""Tools a model can call, run in a child process with a deadline, resource limits and no network.

base         the tool protocol and the result of a call
sandbox      starts the child and reads its answer;  jail  is the program the child runs
workers      long-lived jailed processes that serve one function
library      the tools that ship (calculator, python), and a user's own functions
"""
