"""What the runs of one session share: models and prompts in a folder, and a teacher on each device."""

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

TOKEN_VARIABLE = "UNDERSTUDY_DEVICE_TEST_TOKEN"


@dataclass(frozen=True)
class World:
    folder: Path
    prompts: Path
    long_prompts: Path

    def model(self, name: str) -> Path:
        return self.folder / name


class Teachers:
    """Scoring servers, one for each device and dtype, each started once."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._model, self._folder = model, folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, device: str) -> None:
        """Starts the server without waiting for it; in bfloat16 on a GPU, as most teachers are."""
        if device in self._processes:
            return
        command = [sys.executable, "-m", "understudy.teacher.replica.server", "--model", str(self._model)]
        command += [
            "--dtype",
            "bfloat16" if device == "cuda" else "float32",
            "--device",
            device,
            "--threads",
            "1",
        ]
        command += ["--name", "teacher", "--token-env", TOKEN_VARIABLE]
        command += ["--ready-file", str(self._ready(device))]
        with self._log(device).open("wb") as log:
            self._processes[device] = subprocess.Popen(command, stdout=log, stderr=log)

    def url(self, device: str) -> str:
        self.start(device)
        deadline, ready = time.monotonic() + 120, self._ready(device)
        while not ready.exists():
            running = self._processes[device].poll() is None
            assert running and time.monotonic() < deadline, self._log(device).read_text()[-2000:]
            time.sleep(0.05)
        return str(json.loads(ready.read_text())["url"])

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()

    def _ready(self, device: str) -> Path:
        return self._folder / f"{device}.ready"

    def _log(self, device: str) -> Path:
        return self._folder / f"{device}.log"
