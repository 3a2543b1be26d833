"""A recipe from TRL's `DistillationConfig` or `GKDConfig`, the script's model and data arguments included.

`docs/coming-from-trl.md` has both side by side.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from understudy.config.messages.unknown_keys import unknown_key
from understudy.config.tables import RecipeTables
from understudy.porting.recipe_draft import Draft, Verdict, expanded
from understudy.porting.sources import Source

_TEACHER = "teachers.teacher"
_LOGGERS = ("tensorboard", "wandb", "trackio", "mlflow")
_SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
_OPTIMIZERS = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw", "adamw_8bit": "adamw_8bit",
               "adamw_bnb_8bit": "adamw_8bit", "paged_adamw_8bit": "adamw_8bit"}  # fmt: skip
_ATTENTION = ("sdpa", "eager", "flash_attention_2", "flash_attention_3")
_DTYPES = ("float32", "bfloat16", "float16")
_OFF: tuple[Any, ...] = (None, False, 0, -1, "", "no", "none", [], {})
_SERVER = "TRL's own vLLM server speaks another protocol: a run starts plain vLLM servers itself, or uses those at rollout.urls"
_RESUME = "a run is continued by `understudy resume RUN`"

_NOT_NEEDED: dict[str, str] = {
    "logging_*": "metrics are written every step",
    "disable_dropout": "a model is trained as its config says; current families have no dropout",
    "remove_unused_columns": "every column is kept, for the reward",
    "dataset_*": "rows are read as they are",
    "dataloader_*": "prompts are read once, in the trainer's process",
    "packing*": "rows are packed without padding where the model's attention allows it",
    "padding_free": "rows are packed without padding where the model's attention allows it",
    "use_liger_kernel": "losses are fused always (loss.backend)",
    "liger_*": "losses are fused always (loss.backend)",
    "max_length": "it cuts the completions of a dataset, which are not read; data.max_prompt_tokens bounds prompts",
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

_UNSUPPORTED: dict[str, str] = {
    "seq_kd": "rollouts are the student's own; the teacher's answers can be a column of the data (rollout.off_policy)",
    "fp16": "float16 loses small gradients; student.dtype = 'bfloat16' is written",
    "load_in_4bit": "adapters are trained on unquantised weights; trainer.offload_optimizer, student.gradient_checkpointing save memory",
    "load_in_8bit": "adapters are trained on unquantised weights; trainer.offload_optimizer, student.gradient_checkpointing save memory",
    "lora_dropout": "adapters have no dropout",
    "vllm_server_*": _SERVER,
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


def from_trl(source: Source) -> Draft:
    keys = dict(source.keys)
    for old, new in (
        ("model", "model_name_or_path"),
        ("teacher_model", "teacher_model_name_or_path"),
        ("torch_dtype", "dtype"),
    ):
        if isinstance(keys.get(old), str):
            keys.setdefault(new, keys.pop(old))
    draft = Draft(keys, "TRL", notes=list(source.notes))
    gkd = _is_gkd(draft, source)
    if gkd:
        draft.notes.append(
            "of rows that end with an assistant message the student answers what comes before it"
        )
    _models(draft)
    _data(draft)
    _loss(draft, gkd)
    _rollout(draft, gkd)
    _trainer(draft, gkd)
    _run(draft)
    _the_rest(draft)
    written = draft.toml()
    draft.notes += [
        f"{one} is set nowhere; replace it in the recipe" for one in source.unresolved if one in written
    ]
    return draft


def _is_gkd(draft: Draft, source: Source) -> bool:
    program = source.program.lower()
    if "gkd" in program or "distillation" in program:
        return "gkd" in program
    return (
        any(key in draft.given for key in ("seq_kd", "max_new_tokens"))
        and "max_completion_length" not in draft.given
    )


def _models(draft: Draft) -> None:
    for ours, theirs in (("student", "model_name_or_path"), (_TEACHER, "teacher_model_name_or_path")):
        name = draft.get(theirs)
        if name is None:
            draft.notes.append(f"{theirs} is not given: set {ours}.model")
        else:
            draft.put(f"{ours}.model", expanded(name), theirs)
    for ours, theirs in (("student", "model_revision"), (_TEACHER, "teacher_model_revision")):
        if draft.get(theirs, "main") != "main":
            draft.put(f"{ours}.revision", draft.get(theirs), theirs)
        draft.not_needed(theirs, "the main branch is the default")
    if draft.get("trust_remote_code", False):
        if draft.get("model_revision") or Path(expanded(draft.get("model_name_or_path", ""))).is_absolute():
            draft.put("student.trust_remote_code", True, "trust_remote_code")
        else:
            draft.unsupported(
                "trust_remote_code",
                "code from the hub is pinned: student.trust_remote_code = true with student.revision",
            )
    draft.not_needed("trust_remote_code", "it is off here too")
    dtype = "float32" if draft.get("bf16") is False and not draft.get("fp16", False) else "bfloat16"
    draft.put("student.dtype", dtype, "bf16")
    given = draft.get("dtype", "auto")
    draft.put(f"{_TEACHER}.dtype", given if given in _DTYPES else "bfloat16", "dtype")
    attention = draft.get("attn_implementation")
    if attention in _ATTENTION:
        draft.put("student.attention", attention, "attn_implementation")
    elif attention is not None:
        draft.unsupported("attn_implementation", f"student.attention is one of {', '.join(_ATTENTION)}")
    draft.put(
        "student.gradient_checkpointing",
        bool(draft.get("gradient_checkpointing", True)),
        "gradient_checkpointing",
    )
    if draft.get("use_peft", False):
        draft.put("student.lora.rank", draft.get("lora_r", 16), "lora_r", "use_peft")
        draft.put("student.lora.alpha", float(draft.get("lora_alpha", 32)), "lora_alpha")
        targets = draft.get("lora_target_modules")
        if targets not in (None, "all-linear"):
            draft.put(
                "student.lora.targets",
                [targets] if isinstance(targets, str) else list(targets),
                "lora_target_modules",
            )
        draft.not_needed(
            "lora_target_modules", "every linear layer of the decoder is the default of student.lora.targets"
        )
    draft.not_needed("use_peft", "no adapters")


def _data(draft: Draft) -> None:
    name = draft.get("dataset_name")
    if name is None:
        draft.notes.append(
            "no dataset_name: set data.train to a file or a hub dataset; rows of TRL's formats (`prompt`, `messages`) are read as they are"
        )
    else:
        config = f"/{draft.get('dataset_config')}" if draft.get("dataset_config") else ""
        local = Path(expanded(name)).suffix in (".jsonl", ".parquet")
        split = "" if local else f":{draft.get('dataset_train_split', 'train')}"
        draft.put(
            "data.train",
            f"{expanded(name)}{config}{split}",
            "dataset_name",
            "dataset_config",
            "dataset_train_split",
        )
    if draft.get("max_prompt_length") is not None:
        draft.put("data.max_prompt_tokens", draft.get("max_prompt_length"), "max_prompt_length")
    if draft.get("shuffle_dataset") is not None:
        draft.put("data.shuffle", bool(draft.get("shuffle_dataset")), "shuffle_dataset")


def _loss(draft: Draft, gkd: bool) -> None:
    beta = float(draft.get("beta", 0.5 if gkd else 1.0))
    kind = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(beta, "jsd")
    draft.put("loss.kind", kind, "beta")
    if kind == "jsd":
        draft.put("loss.beta", beta, "beta")
    k = draft.get("loss_top_k", 0)
    if k:
        draft.put("loss.signal", "at_ids" if kind == "reverse_kl" else "topk", "loss_top_k")
        draft.put("loss.topk", k, "loss_top_k")
        draft.put(
            "loss.tail", "bucket" if draft.get("loss_add_tail", True) else "renormalise", "loss_add_tail"
        )
        if kind == "jsd":
            draft.notes.append(
                "TRL compares the K best ids of both models; here they are the teacher's (loss.signal = 'topk')"
            )
    else:
        draft.follow("loss.signal", "hidden", "the loss is over the whole vocabulary")
    temperature = float(draft.get("temperature", 0.9 if gkd else 1.0))
    draft.put("rollout.temperature", temperature, "temperature")
    if temperature != 1.0 and not gkd:
        draft.follow(
            "loss.student_temperature",
            temperature,
            "both models' logits are divided by temperature in the loss",
        )
        if k:
            draft.notes.append(
                "the teacher's K scores cannot be re-tempered: set temperature 1, or leave loss_top_k out"
            )
        else:
            draft.put("loss.teacher_temperature", temperature, "temperature")
    share = draft.get("lmbda", 0.5 if gkd else 1.0)
    if share == 1.0:
        draft.tell("lmbda", Verdict.IMPLIED, "every rollout is the student's own")
    elif k and kind == "reverse_kl":
        draft.tell(
            "lmbda",
            Verdict.UNSUPPORTED,
            "the K ids are the student's, and given answers have none; leave loss_top_k out",
        )
    else:
        draft.put("rollout.off_policy", round(1.0 - share, 6), "lmbda")
        draft.follow("rollout.answer_column", "completion", "answers are `completion`, or the last message")
        draft.notes.append(
            f"lmbda = {share:g}: {1 - share:.0%} of the rows are the dataset's own answers, drawn per row (TRL: per batch), so every row must "
            "have one: `completion`, or a last message of the assistant. rollout.off_policy = 0 does without them"
        )


def _rollout(draft: Draft, gkd: bool) -> None:
    tokens = "max_new_tokens" if gkd else "max_completion_length"
    draft.put("rollout.max_new_tokens", draft.get(tokens, 128 if gkd else 512), tokens)
    draft.put("rollout.n", draft.get("num_generations", 1), "num_generations")
    draft.put("rollout.top_p", float(draft.get("top_p", 1.0 if gkd else 0.95)), "top_p")
    draft.put("rollout.top_k", max(draft.get("top_k", 0), 0), "top_k")
    if not draft.get("use_vllm", False):
        draft.not_needed("use_vllm", "rollout.engine = 'hf' writes the rollouts")
        return
    draft.put("rollout.engine", "vllm", "use_vllm")
    shared = draft.get("vllm_mode", "colocate") == "colocate"
    if shared:
        draft.not_needed("vllm_mode", "servers that the run starts share the trainer's GPUs")
    draft.unsupported("vllm_mode", _SERVER)
    each = draft.get("vllm_tensor_parallel_size", 1)
    replicas = max(draft.get("num_processes", 1) // each, 1) if shared else 1
    draft.put("rollout.replicas", replicas, "num_processes")
    draft.vllm(replicas, each, shared)
    arguments = [f"--gpu-memory-utilization={draft.get('vllm_gpu_memory_utilization', 0.3)}"]
    if draft.get("vllm_tensor_parallel_size", 1) > 1:
        arguments.append(f"--tensor-parallel-size={draft.get('vllm_tensor_parallel_size')}")
    draft.put("rollout.engine_args", arguments, "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size")
    for key in ("vllm_max_model_length", "vllm_max_model_len"):
        if draft.get(key) is not None:
            draft.put("rollout.context_length", draft.get(key), key)
    if draft.get("vllm_sync_frequency", 1) == 1:
        draft.not_needed("vllm_sync_frequency", "servers get new weights after every step")
    draft.unsupported(
        "vllm_sync_frequency", "trainer.mode = 'fully_async' with trainer.sync_every publishes less often"
    )


def _trainer(draft: Draft, gkd: bool) -> None:
    ranks, each, cut = (
        draft.get("num_processes", 1),
        draft.get("per_device_train_batch_size", 8),
        draft.get("gradient_accumulation_steps", 1),
    )
    draft.put("trainer.ranks", ranks, "num_processes")
    if ranks == 1 and "num_processes" not in draft.given:
        draft.notes.append(
            "the number of processes is not given; for several multiply trainer.batch_size and set trainer.ranks"
        )
    prompts = max(each * cut * ranks // draft.get("num_generations", 1), 1)
    draft.put(
        "trainer.batch_size",
        prompts,
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "num_processes",
    )
    draft.not_needed("generation_batch_size", "trainer.batch_size counts prompts, rollout.n their rollouts")
    steps = draft.get("max_steps", -1)
    if steps > 0:
        draft.put("trainer.steps", steps, "max_steps")
        draft.not_needed("num_train_epochs", "max_steps ends the run")
    else:
        draft.put("trainer.passes", float(draft.get("num_train_epochs", 3.0)), "num_train_epochs")
        draft.not_needed("max_steps", "num_train_epochs ends the run")
    draft.put(
        "trainer.learning_rate", float(draft.get("learning_rate", 2e-5 if gkd else 1e-6)), "learning_rate"
    )
    draft.put("trainer.weight_decay", float(draft.get("weight_decay", 0.0)), "weight_decay")
    draft.put("trainer.grad_clip", float(draft.get("max_grad_norm", 1.0)), "max_grad_norm")
    schedule = draft.get("lr_scheduler_type", "linear")
    if schedule in _SCHEDULES:
        draft.put("trainer.schedule", _SCHEDULES[schedule], "lr_scheduler_type")
    else:
        draft.unsupported("lr_scheduler_type", "trainer.schedule is constant, linear or cosine")
    ratio, warmup = draft.get("warmup_ratio", 0.0), draft.get("warmup_steps", 0)
    ratio, warmup = (warmup, 0) if 0 < warmup < 1 else (ratio, warmup)
    if warmup > 0:
        draft.put("trainer.warmup_steps", int(warmup), "warmup_steps")
    elif ratio > 0 and steps > 0:
        draft.put("trainer.warmup_steps", int(ratio * steps), "warmup_ratio", "warmup_steps")
    elif ratio > 0:
        for key in ("warmup_ratio", "warmup_steps"):
            draft.unsupported(
                key, "trainer.warmup_steps counts steps: `understudy check` says how many the run has"
            )
    for key in ("warmup_ratio", "warmup_steps"):
        draft.not_needed(key, "no warm-up is the default")
    optimizer = draft.get("optim", "adamw_torch")
    if optimizer in _OPTIMIZERS:
        draft.put("trainer.optimizer", _OPTIMIZERS[optimizer], "optim")
    else:
        draft.unsupported("optim", "trainer.optimizer is adamw or adamw_8bit")


def _run(draft: Draft) -> None:
    if draft.get("save_steps", 500) >= 1:
        draft.put("trainer.checkpoint_every", int(draft.get("save_steps", 500)), "save_steps")
    draft.unsupported("save_steps", "trainer.checkpoint_every counts steps")
    if draft.get("save_total_limit") is not None:
        draft.put("trainer.keep_checkpoints", max(draft.get("save_total_limit"), 2), "save_total_limit")
    for ours, theirs in (("run.dir", "output_dir"), ("run.name", "run_name"), ("run.seed", "seed")):
        if draft.get(theirs) is not None:
            draft.put(ours, draft.get(theirs), theirs)
    loggers = draft.get("report_to", [])
    named = [loggers] if isinstance(loggers, str) else list(loggers)
    draft.put("run.loggers", [name for name in named if name in _LOGGERS], "report_to")
    if draft.get("log_completions", False):
        draft.put(
            "run.rollout_dump_every",
            draft.get("log_completions_steps", 100),
            "log_completions",
            "log_completions_steps",
        )


def _the_rest(draft: Draft) -> None:
    for key, value in draft.given.items():
        if key in draft.entries:
            continue
        instead = next((text for pattern, text in _UNSUPPORTED.items() if fnmatchcase(key, pattern)), None)
        why = next((text for pattern, text in _NOT_NEEDED.items() if fnmatchcase(key, pattern)), None)
        if _harmless(key, value):
            draft.not_needed(key, why or "it is off, or is what happens here")
        elif instead is not None:
            draft.unsupported(key, instead)
        elif why is not None:
            draft.not_needed(key, why)
        else:
            answer = unknown_key(RecipeTables, [key], None)[0].partition("; ")[2]
            draft.unsupported(key, f"not known; {answer}")


def _harmless(key: str, value: Any) -> bool:
    return value in _OFF or _USUAL.get(key) == value
