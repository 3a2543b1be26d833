"""What teacher replicas, engine processes, ranks and loop workers share as processes and servers.

| module | its job |
|---|---|
| `child` | ends a process with its launcher; writes the ready file |
| `bind` | binds an address; beyond loopback only with a token |
| `http` | token check, refusals, clients that disconnect |
| `server` | runs uvicorn until SIGTERM or SIGINT |
| `connections` | kept-alive client connections to one server |
"""
