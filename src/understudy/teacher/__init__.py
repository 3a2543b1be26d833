"""Teachers: frozen models that score the student's rollouts token by token.

    item ──> TeacherRouter ──> TeacherPool ──> ReplicaClient ──HTTP, binary frames──> server ──> Scorer
                                                                                                   │
    scores <── checked by clients/validate <───────────────────────────────────────────────────────┘

| module | its job |
|---|---|
| `route` | which teacher scores which row |
| `mixture` | several teachers' scores of one row as one |
| `protocol` | the bytes on the wire |
| `manifest` | how a replica describes itself |
| `vocabulary` | token→id maps and whether two of them agree |
| `pool/` | replicas of one teacher: choice, deadlines, retries, health, restarts, start-up checks |
| `clients/` | clients of native replicas and of completion servers; validation of every reply |
| `replica/` | the process: HTTP, queue, tensor parallelism |
| `scoring/` | prefill-only scoring with one model |
"""
