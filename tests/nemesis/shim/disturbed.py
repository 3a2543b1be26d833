"""`understudy` in a process that was forked before its environment was known: installs the shim, then runs the command.

With UNDERSTUDY_NEMESIS_FORKED its fork server is a fork of this process too, and rollout workers are forks of that: they have nothing left to import.
"""

import os
import runpy
import tempfile

import sitecustomize

tempfile.tempdir = None  # of the process that it was forked from
sitecustomize.install()
if "UNDERSTUDY_NEMESIS_FORKED" in os.environ:
    import forked_server
    import forked_worker

    forked_server.install()
    forked_worker.install()
runpy.run_module("understudy.cli.main", run_name="__main__", alter_sys=True)
