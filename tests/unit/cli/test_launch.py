"""`understudy launch`: a Slurm job under a fake Slurm, a KubeRay manifest against what the operator asks for."""

import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from small_runs import call_cli, write_toml

RECIPE: dict[str, Any] = {
    "student": {"model": "Qwen/Qwen3-0.6B"},
    "teachers": {"math": {"model": "Qwen/Qwen3-8B", "placement": "pool", "pool": "teachers", "replicas": 2}},
    "data": {"train": "train.jsonl"},
    "cluster": {"backend": "ray", "pools": {"teachers": {"nodes": 2, "gpus_per_node": 4}}},
    "run": {"name": "my-run"},
}
CRD = os.environ.get("KUBERAY_RAYJOB_CRD")
"""The file ray.io_rayjobs.yaml of a KubeRay release; it is not part of this project."""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    return str(write_toml(tmp_path / "recipe.toml", RECIPE))


def program(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with stand-ins for Slurm's programs, Ray and understudy that record their calls."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program(
        folder, "sbatch", 'cp "${@: -1}" "$SEEN/submitted"; echo "$*" > "$SEEN/sbatch"; echo "4711;cluster"'
    )
    program(folder, "scontrol", 'printf "node1\\nnode2\\nnode3\\n"')
    # Runs the command on this machine, without the flags.
    program(
        folder,
        "srun",
        'echo "$*" >> "$SEEN/srun"; while [[ "$1" == -* ]]; do [ "$1" = -w ] && shift; shift; done; "$@"',
    )
    program(folder, "hostname", "echo 10.0.0.1 10.0.0.2")
    program(folder, "ray", 'echo "$* auth=$RAY_AUTH_MODE:${#RAY_AUTH_TOKEN}" >> "$SEEN/ray"')
    program(folder, "python3", 'echo "$2" "$3" "$4" >> "$SEEN/joined"; [ $(wc -l < "$SEEN/joined") -gt 1 ]')
    program(folder, "understudy", 'printf "%s\\n" "$@" > "$SEEN/understudy"')
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("SEEN", str(tmp_path))
    return tmp_path


def test_a_submitted_job_starts_ray_on_every_node_and_the_run_on_the_head(slurm: Path, recipe: str) -> None:
    job = slurm / "job.sh"
    code, output = call_cli(
        "launch", recipe, "trainer.steps=3", "--slurm", "--sbatch=--time=12:00:00", "-o", str(job), "--submit"
    )
    assert code == 0 and "3 machines, at most 4 GPUs each" in output and "submitted job 4711" in output, (
        output
    )
    assert (slurm / "submitted").read_text() == job.read_text()
    flags = [
        line.removeprefix("#SBATCH ") for line in job.read_text().splitlines() if line.startswith("#SBATCH")
    ]
    assert {"--nodes=3", "--gpus-per-node=4", "--time=12:00:00", "--signal=B:TERM@180"} <= set(flags)
    subprocess.run(["bash", "-n", str(job)], check=True)
    env = {**os.environ, "SLURM_JOB_NODELIST": "node[1-3]", "SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_ID": "7"}
    done = subprocess.run(
        ["bash", str(job)], env=env, cwd=slurm, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    started = sorted((slurm / "ray").read_text().splitlines())
    assert started == [
        "start --address=10.0.0.1:6379 --block auth=token:64",
        "start --head --port=6379 --include-dashboard=false --block auth=token:64",
    ]
    assert "--nodes=2 --ntasks=2 --overlap --exclude=node1" in (slurm / "srun").read_text()
    assert (slurm / "joined").read_text().splitlines()[-1].endswith("10.0.0.1:6379 3"), (
        "the job waits for all nodes"
    )
    arguments = (slurm / "understudy").read_text().splitlines()
    assert arguments == [
        "train", recipe, "trainer.steps=3", "cluster.backend=ray", "cluster.address=10.0.0.1:6379", "run.dir=runs/my-run-7"
    ]  # fmt: skip
    (slurm / "runs" / "my-run-7").mkdir(parents=True)
    (slurm / "runs" / "my-run-7" / "recipe.json").write_text("{}")
    subprocess.run(["bash", str(job)], env=env, cwd=slurm, check=True, timeout=60)
    arguments = (slurm / "understudy").read_text().splitlines()
    assert arguments == ["resume", "runs/my-run-7", "cluster.address=10.0.0.1:6379"], (
        "a requeued job resumes the run"
    )


def test_overrides_are_quoted_in_the_slurm_script(slurm: Path, recipe: str) -> None:
    code, script = call_cli("launch", recipe, 'run.note="it\'s $(touch pwned)"', "--slurm")
    assert code == 0
    env = {**os.environ, "SLURM_JOB_NODELIST": "n", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_ID": "7"}
    subprocess.run(["bash", "-c", script], env=env, cwd=slurm, check=True, timeout=60)
    assert 'run.note="it\'s $(touch pwned)"' in (slurm / "understudy").read_text().splitlines()
    assert not (slurm / "pwned").exists()


def test_launch_refuses_wrong_options_and_reports_failures_of_sbatch(
    slurm: Path, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, output = call_cli("launch", recipe, "--slurm", "--submit")
    assert code == 2 and "--submit goes with --slurm and -o FILE" in output
    code, output = call_cli("launch", recipe, "cluster.backend=local", "--slurm")
    assert code == 2 and "cluster" in output
    code, output = call_cli("launch", recipe, "trainer.stepps=3", "--slurm")
    assert code == 2 and "trainer.steps" in output
    program(slurm / "bin", "sbatch", "echo 'Invalid partition' >&2; exit 1")
    code, output = call_cli("launch", recipe, "--slurm", "-o", str(slurm / "job.sh"), "--submit")
    assert code == 2 and "sbatch refused" in output and "Invalid partition" in output
    monkeypatch.setenv("PATH", "/nowhere")
    code, output = call_cli("launch", recipe, "--slurm", "-o", str(slurm / "job.sh"), "--submit")
    assert code == 2 and "sbatch is not on PATH" in output


def manifest(recipe: str, *arguments: str) -> dict[str, Any]:
    code, text = call_cli(
        "launch", recipe, *arguments, "--kuberay", "--image", "registry.example/understudy-ray:0.1"
    )
    assert code == 0, text
    found: dict[str, Any] = yaml.safe_load(text)
    if CRD:
        versions = yaml.safe_load(Path(CRD).read_text())["spec"]["versions"]
        schema = next(one for one in versions if one["name"] == "v1")["schema"]["openAPIV3Schema"]
        jsonschema.validate(found, strict(schema))
    return found


def strict(schema: Any) -> Any:
    """The schema, refusing fields that it does not know, as `kubectl apply --validate=strict` does."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: strict(value) for key, value in schema.items()}
    if schema.get("x-kubernetes-int-or-string"):
        inner["type"] = ["integer", "string"]
        inner.pop("anyOf", None)
    known = schema.get("properties")
    if isinstance(known, dict) and schema.get("type") == "object" and known.keys() != {"name"}:
        inner.setdefault("additionalProperties", False)
    return inner


def test_a_kuberay_manifest_has_the_trainer_on_the_head_and_one_worker_group_per_pool(recipe: str) -> None:
    found = manifest(recipe, "trainer.steps=3")
    assert (found["apiVersion"], found["kind"], found["metadata"]) == (
        "ray.io/v1",
        "RayJob",
        {"name": "my-run"},
    )
    entry = found["spec"]["entrypoint"]
    assert entry.startswith(
        f"understudy train {recipe} trainer.steps=3 cluster.backend=ray cluster.address=auto"
    )
    cluster = found["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    (group,) = cluster["workerGroupSpecs"]
    assert (group["groupName"], group["replicas"], group["minReplicas"], group["maxReplicas"]) == (
        "teachers",
        2,
        2,
        2,
    )
    gpus = [
        one["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
        for one in (cluster["headGroupSpec"], group)
    ]
    assert gpus == ["1", "4"]


def test_the_head_of_a_kuberay_manifest_is_the_first_machine_of_the_students_pool(tmp_path: Path) -> None:
    cluster = {
        "backend": "ray",
        "roles": {"student": "training"},
        "pools": {"teachers": {"nodes": 2, "gpus_per_node": 4}, "training": {"nodes": 2, "gpus_per_node": 8, "cpus_per_node": 32}},
    }  # fmt: skip
    recipe = write_toml(tmp_path / "recipe.toml", {**RECIPE, "cluster": cluster, "trainer": {"ranks": 16}})
    spec = manifest(str(recipe))["spec"]["rayClusterSpec"]
    assert {one["groupName"]: one["replicas"] for one in spec["workerGroupSpecs"]} == {
        "teachers": 2,
        "training": 1,
    }
    limits = spec["headGroupSpec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {"cpu": "32", "memory": "64Gi", "nvidia.com/gpu": "8"}
