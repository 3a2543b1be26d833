"""The peer's side of the whole-step benchmarks: steps of TRL's DistillationTrainer, timed from inside.

    PYTHON_WITH_TRL benchmarks/step_trl.py SPEC.json OUT.jsonl

Run by step.py and step_cpu.py in TRL's own environment; imports nothing of this project. SPEC names student,
teacher, prompts (jsonl), batch, micro_batch, new_tokens, steps, dtype, device, vllm and threads. OUT holds
one line per step: seconds, completion tokens, and the seconds of its parts.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import DistillationConfig, DistillationTrainer


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    out = Path(sys.argv[2])
    if spec["threads"]:
        torch.set_num_threads(spec["threads"])
    rows = [json.loads(line) for line in Path(spec["prompts"]).read_text().splitlines()]
    prompts = [row.get("prompt") or row["messages"] for row in rows]
    model_options = {"dtype": spec["dtype"]}
    with tempfile.TemporaryDirectory() as folder:
        config = DistillationConfig(
            output_dir=folder,
            max_steps=spec["steps"],
            per_device_train_batch_size=spec["micro_batch"],
            gradient_accumulation_steps=spec["batch"] // spec["micro_batch"],
            max_completion_length=spec["new_tokens"],
            learning_rate=spec["learning_rate"],
            beta=0.0,
            temperature=1.0,
            lr_scheduler_type="constant",
            gradient_checkpointing=False,
            bf16=spec["dtype"] == "bfloat16",
            use_cpu=spec["device"] == "cpu",
            model_init_kwargs=model_options,
            teacher_model_init_kwargs=model_options,
            use_vllm=spec["vllm"],
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=0.3,
            vllm_max_model_length=spec["context"],
            dataloader_pin_memory=False,
            save_strategy="no",
            report_to="none",
            logging_steps=1,
            disable_tqdm=True,
            seed=0,
        )
        trainer = DistillationTrainer(
            model=spec["student"],
            teacher_model=spec["teacher"],
            args=config,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
        )
        watch = Watch(out, spec["device"])
        watch.time(trainer, "_generate_single_turn", "generate")
        watch.time(trainer, "_generate_and_score_completions", "prepare")
        watch.time(trainer, "_compute_loss", "score and forward")
        trainer.add_callback(watch)
        trainer.train()
    print("first and last loss", [entry.get("loss") for entry in trainer.state.log_history][:2])


class Watch(TrainerCallback):
    """Wall time of steps and of a few of the trainer's own methods."""

    def __init__(self, out: Path, device: str) -> None:
        self.out, self.device = out, device
        self.steps: list[dict[str, Any]] = []
        self.parts: dict[str, float] = {}
        self.tokens = 0
        self.started = 0.0

    def now(self) -> float:
        if self.device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter()

    def time(self, trainer: Any, method: str, name: str) -> None:
        inner = getattr(trainer, method)

        def timed(*arguments: Any, **options: Any) -> Any:
            start = self.now()
            result = inner(*arguments, **options)
            self.parts[name] = self.parts.get(name, 0.0) + self.now() - start
            if name == "prepare":
                self.tokens += int(result["completion_mask"].sum())
            return result

        setattr(trainer, method, timed)

    def on_step_begin(self, *arguments: Any, **options: Any) -> None:
        # Later steps are timed from the end of the previous one, so that no time between two steps is left
        # out.
        if not self.started:
            self.started = self.now()

    def on_step_end(self, *arguments: Any, **options: Any) -> None:
        end = self.now()
        self.steps.append({"seconds": end - self.started, "tokens": self.tokens, "parts": dict(self.parts)})
        self.started, self.tokens, self.parts = end, 0, {}
        with self.out.open("a") as handle:
            handle.write(json.dumps(self.steps[-1]) + "\n")
        print(
            f"TRL step {len(self.steps)}: {self.steps[-1]['seconds']:.2f} s, {self.steps[-1]['tokens']} tokens",
            flush=True,
        )


if __name__ == "__main__":
    main()
