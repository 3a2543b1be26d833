"""Imports what trainers and their processes need beyond torch: two seconds of CPU time in each."""

import sys

import transformers.models.qwen3.modeling_qwen3  # noqa: F401

import understudy.run.launch  # noqa: F401

for name in (
    "teacher.replica.server",
    "engines.hosted.process",
    "assembly.processes.rank",
    "assembly.processes.critic",
    "rollout.workers.process",
):
    sys.modules.pop(
        f"understudy.{name}", None
    )  # run as `__main__`, which warns of a module that is there already
