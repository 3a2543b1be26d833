"""The student's tensors by name: as engines load them, and as checkpoints store and restore them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from understudy.errors import CheckpointError, PolicyError
from understudy.policy.checkpoints.state import unique_tensors
from understudy.policy.lora import LoraSettings, adapter_tensors, is_adapter, mark_of_base, merged_weights
from understudy.policy.optim.adamw import MasterAdamW, assign
from understudy.policy.optim.ema import WeightAverage
from understudy.policy.ranks.shard import Ranks, whole


class StudentWeights:
    """Reads and writes the tensors of a `Policy`, which calls it. Reading is collective: every rank must call it."""

    def __init__(
        self,
        model: PreTrainedModel,
        lora: LoraSettings | None,
        ranks: Ranks,
        dtypes: Mapping[str, torch.dtype],
        optimizer: MasterAdamW,
        average: WeightAverage | None,
    ) -> None:
        """`dtypes`: the student's own, by name, from before its weights were sharded."""
        self._model, self._lora, self._ranks, self._dtypes = model, lora, ranks, dtypes
        self._optimizer, self._average = optimizer, average
        self._base_mark: bytes | None = None
        """Hash of the frozen weights below adapters, computed on first use."""

    def named(self, dtype: torch.dtype) -> list[tuple[str, torch.Tensor]]:
        """Whole weights in the student's dtype, tied ones once. Adapters are merged in, in `dtype`."""
        if self._lora is not None:
            return [(name, tensor.to(dtype)) for name, tensor in merged_weights(self._model, whole)]
        return [
            (name, whole(p.detach()).to(self._dtypes[name])) for name, p in self._model.named_parameters()
        ]

    def adapters(self) -> list[tuple[str, torch.Tensor]]:
        if self._lora is None:
            raise PolicyError("this student has no adapters; set [student.lora]")
        if self._base_mark is None:
            self._base_mark = mark_of_base(self._model, self._dtypes, whole)
        return adapter_tensors(self._model, self._base_mark, whole)

    def averaged(self) -> list[tuple[str, torch.Tensor]]:
        if self._average is None:
            raise PolicyError("this run keeps no average of its weights; set ema_decay")
        if self._lora is not None:
            raise PolicyError(
                "with adapters the average is one of adapters, which an engine cannot load by itself"
            )
        averages = self._average.values
        return [
            # A frozen weight has no average of its own.
            (name, whole(averages.get(name, weight.detach())).to(self._dtypes[name]))
            for name, weight in self._model.named_parameters()
        ]

    def saved_model(self) -> dict[str, torch.Tensor]:
        return self._gathered(self._trained(), self._dtypes)

    def saved_optimizer(self) -> dict[str, torch.Tensor]:
        averages = self._average.state() if self._average is not None else {}
        return self._gathered({**self._optimizer.state(), **averages})

    def restore(self, model: Mapping[str, torch.Tensor], optimizer: Mapping[str, torch.Tensor]) -> None:
        """Weights are restored in place, so an engine that shares their memory has them too."""
        # A critic's tensors may be stored beside the student's; the code that stored them takes them out.
        own = {name: one for name, one in optimizer.items() if not name.startswith(("ema/", "critic."))}
        self._check_fits(model, self._trained())
        self._optimizer.check_state(own)
        self.restore_model(model)
        self._optimizer.load_state(own)
        if self._average is not None:
            self._average.load_state(optimizer)

    def restore_model(self, saved: Mapping[str, torch.Tensor]) -> None:
        """The weights alone. `CheckpointError` if names, shapes or dtypes differ."""
        trained = self._trained()
        self._check_fits(saved, trained)
        with torch.no_grad():
            for name, tensor in saved.items():
                assign(trained[name], tensor)

    def _check_fits(self, saved: Mapping[str, torch.Tensor], trained: Mapping[str, torch.Tensor]) -> None:
        missing, unknown = sorted(trained.keys() - saved.keys()), sorted(saved.keys() - trained.keys())
        if missing or unknown:
            raise CheckpointError(
                f"the checkpoint does not fit the student: missing {missing[:3] or 'nothing'}, unknown {unknown[:3] or 'nothing'}; "
                "was the run started with another model?"
            )
        for name, tensor in saved.items():
            dtype = self._dtypes[name]
            if tensor.shape != trained[name].shape or tensor.dtype != dtype:
                raise CheckpointError(
                    f"the checkpoint holds {name} as {tensor.dtype} {tuple(tensor.shape)}, the student has {dtype} "
                    f"{tuple(trained[name].shape)}; resume with the model and dtype the run was started with"
                )

    def _trained(self) -> dict[str, torch.Tensor]:
        """The tensors of a checkpoint: the whole model, or the adapters if the rest is frozen."""
        tensors = unique_tensors(self._model)
        if self._lora is None:
            return tensors
        return {name: tensor for name, tensor in tensors.items() if is_adapter(name)}

    def _gathered(
        self, tensors: Mapping[str, torch.Tensor], dtypes: Mapping[str, torch.dtype] | None = None
    ) -> dict[str, torch.Tensor]:
        """Whole tensors by name. From several ranks one at a time, into rank 0's host memory: a device that holds its
        shards may not hold all of them."""
        found = {}
        for name, tensor in tensors.items():
            full = whole(tensor)
            full = full if dtypes is None else full.to(dtypes[name])
            if self._ranks.size == 1:
                found[name] = full
            elif self._ranks.rank == 0:
                found[name] = full.to("cpu")
        return found
