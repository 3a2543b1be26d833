"""The pool of a teacher's replicas: health, balance, canaries, restarts."""
