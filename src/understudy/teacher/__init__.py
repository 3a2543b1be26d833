"""Teachers: frozen models that judge what the student wrote, token by token.

    item ──> score.score ──> route.TeacherRouter ──> pool.TeacherPool ──> client.ReplicaClient ─┐
                                                                                     HTTP, binary │ protocol
    scores <── validate <───────────────────────────────────────────────── server ── scorer <────┘

protocol   the bytes on the wire              health     a replica's life as a pure state machine
scorer     prefill-only scoring of one model  balance    who gets the next request: outstanding tokens
server     one replica process                pool       replicas of one teacher: deadlines, retries, restarts
client     one replica, seen from outside     route      which teacher judges which row
validate   no bad number passes               integrity  start-up checks: identity, agreement, vocabulary
"""
