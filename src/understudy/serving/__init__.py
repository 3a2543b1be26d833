"""What teacher replicas, engine processes, ranks and loop workers share as processes and servers.

| module | its job |
|---|---|
| `process` | the main function: arguments, token, ready file, the launcher's death, exit codes |
| `bind` | binds an address; beyond loopback only with a token |
| `http` | token check, refusals, clients that disconnect |
| `server` | serves an application until SIGTERM or SIGINT |
| `supervisor` | when a lost process is started again, and when it is given up |
| `frames` | messages with arrays as bytes |
| `client`, `endpoint` | the HTTP client of one server and its errors; where a server answers |
"""
