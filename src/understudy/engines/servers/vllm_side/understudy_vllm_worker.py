"""vLLM worker extension: loads new weights in place, from a file or from the trainer's GPU memory.

vLLM's own interpreter imports this module, in an environment without understudy: do not import understudy
here. This file's folder is on that interpreter's path, and `--worker-extension-cls` names the class.
"""

import base64
import json
import time
from typing import Any

import torch
from safetensors import safe_open
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from understudy_copy_plan import CopyPlan, record_copies  # type: ignore[import-not-found]

_BYTES_FIELDS = ("storage_handle", "ref_counter_handle", "event_handle")


class UnderstudyWorker:
    """Mixed into vLLM's worker class. The trainer calls it through `/collective_rpc`, with text arguments."""

    model_runner: Any
    device: Any
    parallel_config: Any

    def understudy_load_weights(self, path: str, version: str) -> dict[str, Any]:
        """Loads every tensor of a safetensors file by its Hugging Face name. Returns version and count."""
        count = 0

        def tensors() -> Any:
            nonlocal count
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    count += 1
                    yield name, file.get_tensor(name)

        self.model_runner.reload_weights(weights_iterator=tensors())
        _pack_again(self._understudy_model())
        return {"version": version, "tensors": count}

    def understudy_attach(self, gpu: str, tensors: str) -> dict[str, Any]:
        """Maps the trainer's tensors into this process: a JSON list of (name, CUDA handle fields).

        The trainer keeps them at the same addresses, so every later update is only a copy on the GPU.
        Declined (`attached` = 0) if this worker is on another GPU than the trainer, or is one of several
        that share the model.
        """
        same = self.device.type == "cuda" and gpu == str(torch.cuda.get_device_properties(self.device).uuid)
        if not same or self.parallel_config.world_size > 1:
            return {"attached": 0}
        self.understudy_attached = [
            (name, _opened(fields, self.device)) for name, fields in json.loads(tensors)
        ]
        self.understudy_plan: CopyPlan | None = None
        return {"attached": len(self.understudy_attached)}

    def understudy_copy(self, version: str) -> dict[str, Any]:
        """Copies the attached tensors into the model; returns the duration too.

        The first time the model's own loader does it and its copies are recorded. Later calls replay the
        copies in a few launches.
        """
        start = time.perf_counter()
        if self.understudy_plan is None:
            with torch.no_grad():
                self.understudy_plan = record_copies(self._understudy_model(), self.understudy_attached)
        else:
            self.understudy_plan.run()
        torch.accelerator.synchronize()
        return {
            "version": version,
            "tensors": len(self.understudy_attached),
            "planned": self.understudy_plan.complete,
            "seconds": time.perf_counter() - start,
        }

    def _understudy_model(self) -> Any:
        get_model = getattr(self.model_runner, "get_model", None)
        return get_model() if get_model else self.model_runner.model


def _pack_again(model: Any) -> None:
    """Repacks matrices on a CPU, where vLLM multiplies with packed copies.

    A head tied to the embedding is not reloaded itself, so its packed copy would keep the old weights.
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if hasattr(module, "cpu_linear") and method is not None and module.weight.numel():
            method.process_weights_after_loading(module)


def _opened(fields: dict[str, Any], device: Any) -> torch.Tensor:
    """Opens the trainer's tensor. Handles are base64 text; the device index is this process's own."""
    fields = {
        name: base64.b64decode(value) if name in _BYTES_FIELDS else value for name, value in fields.items()
    }
    return rebuild_cuda_tensor(
        torch.Tensor,
        torch.Size(fields["size"]),
        tuple(fields["stride"]),
        fields["offset"],
        torch.UntypedStorage,
        getattr(torch, fields["dtype"]),
        device.index or 0,
        fields["storage_handle"],
        fields["storage_size"],
        fields["storage_offset"],
        False,
        fields["ref_counter_handle"],
        fields["ref_counter_offset"],
        fields["event_handle"],
        fields["event_sync"],
    )
