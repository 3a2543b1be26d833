"""TRL's keys that have no counterpart here: not needed, with the reason, or not supported, with what to use instead."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

OFF: tuple[Any, ...] = (None, False, 0, -1, "", "no", "none", [], {})
"""Values that turn a feature off."""
SERVER = "TRL's own vLLM server speaks another protocol: a run starts plain vLLM servers itself, or uses those at rollout.urls"
_RESUME = "a run is continued by `understudy resume RUN`"

NOT_NEEDED: dict[str, str] = {
    "logging_*": "metrics are written every step",
    "disable_dropout": "a model is trained as its config says; current families have no dropout",
    "remove_unused_columns": "every column is kept, for the reward",
    "dataset_*": "rows are read as they are",
    "dataloader_*": "prompts are read once, in the trainer's process",
    "packing*": "rows are packed without padding where the model's attention allows it",
    "padding_free": "rows are packed without padding where the model's attention allows it",
    "use_liger_kernel": "losses are always fused (loss.backend)",
    "liger_*": "losses are always fused (loss.backend)",
    "max_length": "it cuts prompt and completion together; here data.max_prompt_tokens bounds prompts, rollout.max_new_tokens answers",
    "launcher.*": "of the launcher: trainer.ranks counts the processes, and FSDP2 shards the student over them",
    "env.*": "set it in the environment of `understudy train`",
    "teacher_tokenizer_name_or_path": "a teacher's tokenizer lies with its model",
    "uld_*": "scores are moved to the student's tokens by bytes (teachers.teacher.vocabulary = 'align')",
    "use_extended_uld": "scores are moved to the student's tokens by bytes (teachers.teacher.vocabulary = 'align')",
    "bf16_full_eval": "evaluation is greedy decoding in student.dtype",
    "do_eval": "accuracy needs data.eval and data.reward; without them nothing is evaluated",
    "log_level*": "logs are in the run directory",
    "include_*": "metrics are written every step",
    "torch_empty_cache_steps": "trainer.micro_batch_tokens bounds memory",
    "torch_compile*": "the layers are compiled with student.compile",
    "average_tokens_across_devices": "a loss is normalised over the whole batch",
    "save_only_model": "a checkpoint holds everything that a resume needs",
    "save_safetensors": "models are written as safetensors",
    "auto_find_batch_size": "trainer.micro_batch_tokens bounds memory; `understudy plan` counts it",
    "completion_only_loss": "the loss is on the student's own tokens alone",
    "assistant_only_loss": "the loss is on the student's own tokens alone",
    "gradient_checkpointing_kwargs*": "student.gradient_checkpointing",
    "model_init_kwargs*": "the student's keys are under [student]",
    "teacher_model_init_kwargs*": "the teacher's keys are under [teachers.teacher]",
    "ddp_*": "ranks are ours (trainer.ranks)",
    "fsdp*": "the student is sharded by FSDP2 over trainer.ranks",
    "deepspeed*": "the student is sharded by FSDP2 over trainer.ranks",
    "config_file": "accelerate's file: trainer.ranks counts the processes",
    "num_processes": "trainer.ranks",
    "vllm_server_timeout": "cluster.start_timeout_seconds",
    "vllm_group_port": "weights travel without a port to choose",
    "vllm_enable_sleep_mode": "engines are never put to sleep",
    "vllm_model_impl": "vLLM's flag --model-impl goes into rollout.engine_args",
    "vllm_*": "use_vllm is off",
    "num_completions_to_print": "`understudy view` shows rows",
    "log_completions_steps": "log_completions is off",
    "per_device_eval_batch_size": "held-out answers are decoded rollout.max_batch at a time",
    "eval_*": "accuracy needs data.eval and data.reward; without them nothing is evaluated",
    "save_strategy": "trainer.checkpoint_every counts steps",
    "overwrite_output_dir": "a run makes a new folder",
    "resume_from_checkpoint": _RESUME,
    "lora_*": "no adapters: use_peft is off",
    "loss_add_tail": "the loss is over the whole vocabulary",
    "reverse_kl_top_1_mode": "the loss is over the whole vocabulary",
    "wandb_*": "wandb reads WANDB_PROJECT, WANDB_ENTITY and WANDB_RUN_GROUP from the environment",
    "trackio_*": "trackio reads its own environment variables",
    "do_train": "`understudy train` trains",
    "tf32": "torch's own setting counts",
}  # fmt: skip

UNSUPPORTED: dict[str, str] = {
    "seq_kd": "rollouts are the student's own; the teacher's answers can be a column of the data (rollout.off_policy)",
    "fp16": "float16 loses small gradients; student.dtype = 'bfloat16' is written",
    "load_in_4bit": "adapters are trained on unquantised weights; trainer.offload_optimizer, student.gradient_checkpointing save memory",
    "load_in_8bit": "adapters are trained on unquantised weights; trainer.offload_optimizer, student.gradient_checkpointing save memory",
    "uld_crossentropy_weight": "loss.sft_coef adds the cross-entropy of given answers",
    "peft_config": "[student.lora] rank, alpha, targets",
    "lr_scheduler_kwargs*": "schedules fall to 0 at the end of the run",
    "group_by_length": "rows are always distributed to ranks by their length",
    "lora_dropout": "adapters have no dropout",
    "vllm_server_*": SERVER,
    "vllm_structured_outputs_regex": "rollouts are not constrained",
    "use_teacher_server": "serve the teacher with vLLM or `understudy serve-teacher`, and name it: teachers.NAME.placement = 'external', urls",
    "teacher_model_server_url": "serve the teacher with vLLM or `understudy serve-teacher`, and name it: teachers.NAME.placement = 'external', urls",
    "push_to_hub": "`understudy export RUN OUT --push ORG/NAME` writes a Hugging Face folder with a model card and uploads it",
    "hub_*": "`understudy export RUN OUT` writes a Hugging Face folder with a model card",
    "adam_beta1": "AdamW's betas are 0.9 and 0.999",
    "adam_beta2": "AdamW's betas are 0.9 and 0.999",
    "adam_epsilon": "AdamW's epsilon is 1e-8",
    "neftune_noise_alpha": "embeddings get no noise",
    "load_best_model_at_end": "`understudy export RUN OUT --best` takes the best checkpoint (trainer.keep_best)",
}  # fmt: skip
_USUAL = {"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8}


def settled(key: str, value: Any) -> tuple[bool, str] | None:
    """(is it unsupported, what to say) of a key without a counterpart; None for a key that is not known."""
    instead = next((text for pattern, text in UNSUPPORTED.items() if fnmatchcase(key, pattern)), None)
    why = next((text for pattern, text in NOT_NEEDED.items() if fnmatchcase(key, pattern)), None)
    if value in OFF or _USUAL.get(key) == value:
        return False, why or "it is off, or is what happens here"
    if instead is not None:
        return True, instead
    return None if why is None else (False, why)
