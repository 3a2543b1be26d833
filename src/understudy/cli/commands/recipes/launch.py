"""Write a Slurm job or a KubeRay manifest for a recipe, and submit the job.

The recipe's keys are checked; models and data are looked at by the run itself, on its own machines.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from understudy.config.recipe import examine, read_tables
from understudy.errors import ClusterError, ConfigError
from understudy.planning.job_files import kuberay_manifest, machines_of, slurm_script

EXAMPLE = "understudy launch recipe.toml --slurm --sbatch=--time=12:00:00 -o job.sh"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", type=Path, help="a TOML recipe with cluster.backend = ray")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="for example trainer.steps=10"
    )
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--slurm", action="store_true", help="a batch script for sbatch")
    kind.add_argument("--kuberay", action="store_true", help="a RayJob for kubectl apply -f")
    parser.add_argument("-o", "--out", type=Path, help="the file to write; printed when not given")
    parser.add_argument("--submit", action="store_true", help="with --slurm: also give the file to sbatch")
    parser.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="FLAG",
        help="with --slurm: a further line for sbatch, for example --sbatch=--partition=gpu; may be repeated",
    )
    parser.add_argument(
        "--image", default="understudy-ray:0.1", help="with --kuberay: an image with understudy[ray]"
    )
    parser.add_argument(
        "--claim", default="shared", help="with --kuberay: the volume claim mounted at /shared (%(default)s)"
    )
    parser.add_argument("--memory", default="64Gi", help="with --kuberay: memory of a pod (%(default)s)")


def run(options: argparse.Namespace) -> None:
    if options.submit and (not options.slurm or options.out is None):
        raise ConfigError(
            "--submit goes with --slurm and -o FILE: the job's script stays, so that it can be read later"
        )
    recipe, problems = examine(read_tables(options.recipe, options.overrides))
    if problems or recipe is None:
        raise ConfigError(problems)
    machines, name = machines_of(recipe), recipe.run.name
    if options.slurm:
        folder = recipe.run.dir or f"runs/{name}"
        text = slurm_script(machines, str(options.recipe), options.overrides, folder, options.sbatch)
    else:
        folder = recipe.run.dir or f"/shared/runs/{name}"
        given = (options.image, options.claim, options.memory)
        text = kuberay_manifest(machines, str(options.recipe), options.overrides, folder, name, *given)
    if options.out is None:
        sys.stdout.write(text)
        return
    options.out.write_text(text)
    print(f"wrote {options.out}: {machines.nodes} machines, at most {machines.gpus_per_node} GPUs each")
    if options.submit:
        _submit(options.out)


def _submit(script: Path) -> None:
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise ClusterError(f"--submit: sbatch is not on PATH; run it where Slurm is: sbatch {script}")
    done = subprocess.run([sbatch, "--parsable", str(script)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ClusterError(f"sbatch refused {script} ({done.returncode}): {done.stderr.strip()}")
    print(f"submitted job {done.stdout.strip().split(';')[0]}")
