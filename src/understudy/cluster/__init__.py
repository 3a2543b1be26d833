"""Child processes on this machine or on a Ray cluster, and their placement on devices.

| module | its job |
|---|---|
| `local` | starts, watches and stops processes on this machine |
| `fork_server`, `fork_server_process` | the fork server: the launcher's handle and its process |
| `mps` | NVIDIA's multi-process service for processes that share a GPU |
| `placement`, `devices` | which process gets which device; the GPUs of this machine |
| `ray` | the interface of `local` for processes on a Ray cluster |
| `ray_cluster`, `ray_probe` | the connection to Ray; whether a Ray head answers at an address |
| `ray_layout` | placement as Ray's groups of bundles |
| `ray_supervisor` | the Ray actor that owns processes on another machine |
"""
