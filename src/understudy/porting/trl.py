"""A recipe from TRL's `DistillationConfig`, `GKDConfig` or `GOLDConfig`, the script's model and data arguments included.

`docs/coming-from-trl.md` has both side by side.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

from understudy.config.base import flatten
from understudy.config.messages.unknown_keys import unknown_key
from understudy.config.tables import RecipeTables
from understudy.errors import ConfigError
from understudy.porting.recipe_draft import Draft, Verdict, expanded
from understudy.porting.sources import Source
from understudy.porting.trl_keys import SERVER, settled

_TEACHER = "teachers.teacher"
_KWARGS, _TEACHER_KWARGS = "model_init_kwargs", "teacher_model_init_kwargs"
_LOGGERS = ("tensorboard", "wandb", "trackio", "mlflow")
_SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",  # lr_scheduler_kwargs, which hold the minimum, are named as not supported
    "cosine_warmup_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
_OPTIMIZERS = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw", "adamw_8bit": "adamw_8bit",
               "adamw_bnb_8bit": "adamw_8bit", "paged_adamw_8bit": "adamw_8bit"}  # fmt: skip
_ATTENTION = ("sdpa", "eager", "flash_attention_2", "flash_attention_3")
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class _Kind:
    """Defaults of a class of TRL's that differ from those of the others."""

    name: str
    beta: float
    lmbda: float
    temperature: float
    tokens: str
    """The key of the new tokens."""
    most_tokens: int
    top_p: float
    learning_rate: float
    tempered: bool
    """The loss divides both models' logits by `temperature`."""
    top_k: int = 0
    memory: float = 0.3
    """vllm_gpu_memory_utilization."""


_DISTILLATION = _Kind("DistillationConfig", 1.0, 1.0, 1.0, "max_completion_length", 512, 0.95, 1e-6, True)
_KINDS = {
    "serverdistillation": replace(_DISTILLATION, name="ServerDistillationConfig", top_k=1),
    "distillation": _DISTILLATION,
    "gkd": _Kind("GKDConfig", 0.5, 0.5, 0.9, "max_new_tokens", 128, 1.0, 2e-5, False),
    "gold": _Kind("GOLDConfig", 0.5, 0.5, 0.9, "max_completion_length", 128, 0.95, 1e-7, True, memory=0.9),
}
_BEFORE_1_9 = ("lmbda", "use_teacher_server", "loss_add_tail", "reverse_kl_top_1_mode")
"""Keys that DistillationConfig had when its loss_top_k was 1 unless given."""
_OTHERS = {
    "minillm": "is GRPO with the teacher in its advantage. With gamma = 0 rkl_advantage alone is loss.kind = 'k1', loss.signal = "
               "'sampled', loss.policy_gradient = true; single_step_decomposition alone is DistillationConfig(beta=1.0)",
    "iwopd": "weighs tokens by their prefix, which is not there; distillation_objective='jsd' is DistillationConfig",
    "sdft": "lets the student teach itself: a teacher with model = 'student' and a prompt of its own (docs/teachers.md)",
    "sdpo": "lets the student teach itself: a teacher with model = 'student' and a prompt of its own (docs/teachers.md)",
    "grpo": "has no teacher: loss.task_coef and loss.advantage train on rewards (docs/trainer.md)",
    "rloo": "has no teacher: loss.task_coef and loss.advantage train on rewards (docs/trainer.md)",
} | dict.fromkeys(
    ("sft", "dpo", "kto", "orpo", "cpo", "bco", "ppo", "reward", "prm", "xpo", "nashmd", "ssd", "tpo"), "is not distillation on the student's own answers"
)  # fmt: skip


def from_trl(source: Source) -> Draft:
    keys = flatten(source.keys)
    for old, new in (
        ("model", "model_name_or_path"),
        ("student_model_name", "model_name_or_path"),
        ("teacher_model", "teacher_model_name_or_path"),
        ("teacher_model_name", "teacher_model_name_or_path"),
        ("torch_dtype", "dtype"),
        ("datasets.path", "dataset_name"),
    ):
        if isinstance(keys.get(old), str):
            keys.setdefault(new, keys.pop(old))
    draft = Draft(keys, "TRL", notes=list(source.notes))
    kind = _kind(draft, source.program)
    if kind.lmbda < 1.0:
        draft.notes.append(
            "of rows that end with an assistant message the student answers what comes before it"
        )
    _models(draft)
    _data(draft)
    _loss(draft, kind)
    _rollout(draft, kind)
    _trainer(draft, kind)
    _run(draft)
    _the_rest(draft)
    written = draft.toml()
    draft.notes += [
        f"{one} is set nowhere; replace it in the recipe" for one in source.unresolved if one in written
    ]
    return draft


def _kind(draft: Draft, program: str) -> _Kind:
    """By the classes or the script that are named, else by the keys."""
    name = program.lower().replace("_", "")
    named = next((kind for part, kind in _KINDS.items() if part in name), None)
    if named is not None:
        return named
    words = [re.sub("(config|trainer)$", "", word) for word in program.lower().removesuffix(".py").split()]
    parts = {part for word in words for part in re.split(r"[^a-z0-9]+", word)}
    other = next((text for part, text in _OTHERS.items() if any(one.endswith(part) for one in parts)), None)
    if other is not None:
        raise ConfigError(
            f"{program} {other}; import-trl reads {', '.join(one.name for one in _KINDS.values())}"
        )
    if any(key.startswith("uld_") or key == "use_uld_loss" for key in draft.given):
        found = _KINDS["gold"]
    elif "seq_kd" in draft.given or (
        "max_new_tokens" in draft.given and "max_completion_length" not in draft.given
    ):
        found = _KINDS["gkd"]
    else:
        found = _DISTILLATION
    draft.notes.append(f"the trainer is not named: the defaults of TRL's {found.name} are written")
    return found


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
    own = next(
        (
            key
            for key in (f"{_TEACHER_KWARGS}.dtype", f"{_TEACHER_KWARGS}.torch_dtype", "dtype")
            if draft.get(key)
        ),
        "dtype",
    )
    given = draft.get(own, "auto")
    draft.put(f"{_TEACHER}.dtype", given if given in _DTYPES else "bfloat16", own)
    key = next(
        (one for one in ("attn_implementation", f"{_KWARGS}.attn_implementation") if draft.get(one)), ""
    )
    attention = draft.get(key)
    if attention in _ATTENTION:
        draft.put("student.attention", attention, key)
    elif attention is not None:
        draft.unsupported(key, f"student.attention is one of {', '.join(_ATTENTION)}")
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


def _loss(draft: Draft, own: _Kind) -> None:
    beta = float(draft.get("beta", own.beta))
    kind = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(beta, "jsd")
    draft.put("loss.kind", kind, "beta")
    if kind == "jsd":
        draft.put("loss.beta", beta, "beta")
    aligned = bool(draft.get("use_uld_loss", False))
    earlier = own is _DISTILLATION and any(key in draft.given for key in _BEFORE_1_9)
    k = draft.get("loss_top_k", 1 if earlier else own.top_k)
    if earlier and "loss_top_k" not in draft.given:
        draft.notes.append("keys of TRL before 1.9: there loss_top_k is 1 unless given")
    if aligned:
        draft.put(f"{_TEACHER}.vocabulary", "align", "use_uld_loss")
        draft.notes.append(
            "ULD compares sorted probabilities; here the teacher's scores are moved to the student's tokens by bytes, and the divergence of "
            "beta is taken over its K best ids (docs/teachers.md, Another tokenizer)"
        )
    elif k:
        draft.put("loss.signal", "at_ids" if kind == "reverse_kl" else "topk", "loss_top_k")
        draft.put("loss.topk", k, "loss_top_k")
        draft.put(
            "loss.tail", "bucket" if draft.get("loss_add_tail", True) else "renormalise", "loss_add_tail"
        )
        if kind == "jsd":
            draft.notes.append(
                "TRL compares the K best ids of both models; here they are the teacher's (loss.signal = 'topk')"
            )
        elif kind == "reverse_kl" and k == 1 and draft.get("reverse_kl_top_1_mode", "sampled") == "sampled":
            draft.notes.append(
                "TRL's one id is the written token; here it is the student's best. loss.signal = 'hidden' is over the whole vocabulary"
            )
    else:
        draft.follow("loss.signal", "hidden", "the loss is over the whole vocabulary")
    temperature = float(draft.get("temperature", own.temperature))
    draft.put("rollout.temperature", temperature, "temperature")
    if temperature != 1.0 and own.tempered and not aligned:
        draft.follow(
            "loss.student_temperature",
            temperature,
            "both models' logits are divided by temperature in the loss",
        )
        if k:
            draft.notes.append(
                "the teacher's K scores cannot be computed for another temperature: set temperature 1, or leave loss_top_k out"
            )
        else:
            draft.put("loss.teacher_temperature", temperature, "temperature")
    share = draft.get("lmbda", own.lmbda)
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


def _rollout(draft: Draft, own: _Kind) -> None:
    draft.put("rollout.max_new_tokens", draft.get(own.tokens, own.most_tokens), own.tokens)
    draft.put("rollout.n", draft.get("num_generations", 1), "num_generations")
    draft.put("rollout.top_p", float(draft.get("top_p", own.top_p)), "top_p")
    draft.put("rollout.top_k", max(draft.get("top_k", 0), 0), "top_k")
    if not draft.get("use_vllm", False):
        draft.not_needed("use_vllm", "rollout.engine = 'hf' writes the rollouts")
        return
    draft.put("rollout.engine", "vllm", "use_vllm")
    shared = draft.get("vllm_mode", "colocate") == "colocate"
    if shared:
        draft.not_needed("vllm_mode", "servers that the run starts share the trainer's GPUs")
    draft.unsupported("vllm_mode", SERVER)
    each = draft.get("vllm_tensor_parallel_size", 1)
    replicas = max(draft.get("num_processes", 1) // each, 1) if shared else 1
    draft.put("rollout.replicas", replicas, "num_processes")
    draft.vllm(replicas, each, shared)
    words = [f"--gpu-memory-utilization={draft.get('vllm_gpu_memory_utilization', own.memory)}"]
    if draft.get("vllm_tensor_parallel_size", 1) > 1:
        words.append(f"--tensor-parallel-size={draft.get('vllm_tensor_parallel_size')}")
    draft.put("rollout.engine_args", words, "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size")
    for key in ("vllm_max_model_length", "vllm_max_model_len"):
        if draft.get(key) is not None:
            draft.put("rollout.context_length", draft.get(key), key)
    if draft.get("vllm_sync_frequency", 1) == 1:
        draft.not_needed("vllm_sync_frequency", "servers get new weights after every step")
    draft.unsupported(
        "vllm_sync_frequency", "trainer.mode = 'fully_async' with trainer.sync_every publishes less often"
    )


def _trainer(draft: Draft, own: _Kind) -> None:
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
    draft.put("trainer.learning_rate", float(draft.get("learning_rate", own.learning_rate)), "learning_rate")
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
        draft.put("trainer.warmup_steps", math.ceil(ratio * steps), "warmup_ratio", "warmup_steps")
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
            draft.put(ours, draft.get(theirs) if theirs == "seed" else str(draft.get(theirs)), theirs)
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
    unknown: list[str] = []
    for key, value in draft.given.items():
        if key in draft.entries:
            continue
        found = settled(key, value)
        if found is None:
            answer = unknown_key(RecipeTables, [key], None)[0].partition("; ")[2]
            draft.unsupported(key, f"not known; {answer}")
            unknown.append(key)
        elif found[0]:
            draft.unsupported(key, found[1])
        else:
            draft.not_needed(key, found[1])
    if len(unknown) > len(draft.given) // 2:
        raise ConfigError(
            f"{len(unknown)} of {len(draft.given)} keys are none of TRL's ({', '.join(unknown[:4])}, …); give a configuration of "
            "DistillationConfig, GKDConfig or GOLDConfig (verl's: understudy import-verl)"
        )
