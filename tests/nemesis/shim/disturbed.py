"""`understudy` in a process that was forked before its environment was known: installs the shim, then runs the command."""

import runpy
import tempfile

import sitecustomize

tempfile.tempdir = None  # of the process that it was forked from
sitecustomize.install()
runpy.run_module("understudy.cli.main", run_name="__main__", alter_sys=True)
