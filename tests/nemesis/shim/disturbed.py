"""`understudy` in a process that was forked before its environment was known: installs the shim, then runs the command.

With UNDERSTUDY_NEMESIS_FORKED its fork server is a fork of this process too, and its processes are forks of that: they have
nothing left to import.
"""

import os
import runpy
import tempfile
from contextlib import nullcontext

import sitecustomize

tempfile.tempdir = None  # of the process that it was forked from
sitecustomize.install()
server = nullcontext()
if "UNDERSTUDY_NEMESIS_FORKED" in os.environ:
    import forked_server
    import forked_worker

    forked_server.install()
    forked_worker.install()
    if (
        os.environ["UNDERSTUDY_NEMESIS_FORKED"] == "without teachers"
    ):  # such a run has no fork server of its own
        server = forked_server.fork_server.prepared({})
with server:
    runpy.run_module("understudy.cli.main", run_name="__main__", alter_sys=True)
