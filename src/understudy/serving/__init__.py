"""Manners of the processes we start: teachers' replicas, engine processes, ranks and loop workers have them in common.

child    ends with its launcher; says that it is ready;  bind  an address, never an open one without a token
http     who may ask, what is refused and how, clients that hang up;  server  uvicorn, until it is told to stop
"""
