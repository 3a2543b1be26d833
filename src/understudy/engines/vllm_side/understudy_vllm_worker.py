"""What we add to a vLLM worker: new weights from a file, in place, without a restart.

Imported by vLLM's own interpreter, in an environment that does not have understudy: nothing here may import it. The
folder of this file is put on that interpreter's path, and the class is named by `--worker-extension-cls`.
"""

from typing import Any

from safetensors import safe_open


class UnderstudyWorker:
    """Mixed into vLLM's worker class; methods are called through `/collective_rpc`, with text arguments only."""

    model_runner: Any

    def understudy_load_weights(self, path: str, version: str) -> dict[str, Any]:
        """Loads every tensor of a safetensors file by its Hugging Face name. Answers with what it loaded."""
        count = 0

        def tensors() -> Any:
            nonlocal count
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    count += 1
                    yield name, file.get_tensor(name)

        self.model_runner.reload_weights(weights_iterator=tensors())
        self.understudy_version = version
        return {"version": version, "tensors": count}

    def understudy_weight_version(self) -> dict[str, Any]:
        """The version last loaded; a process that was restarted has none."""
        return {"version": getattr(self, "understudy_version", None)}
