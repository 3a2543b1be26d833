"""Names of our keys and values in verl, TRL, HF Trainer, prime-rl, ms-swift and OpenRLHF.

`KEYS` maps a name that those users write to our key, or to a sentence that explains the difference. A name
matches the end of a key's path: `optim.lr` matches `actor_rollout_ref.actor.optim.lr`, and `lr` matches any
other `…lr`. The longest match wins. `*` stands for one part of a path. In sentences, keys are in backquotes;
a test checks that every one of them exists.
"""

from __future__ import annotations

from typing import Any

_PASSES = (
    "passes over the data are `trainer.passes`, in place of `trainer.steps`; `trainer.epochs` is something else: how often each batch is "
    "trained on (PPO epochs)"
)
_MICRO = "a micro-batch is counted in tokens, `trainer.micro_batch_tokens`; it changes memory and speed, not the result"
_ACCUMULATION = "gradients are accumulated by themselves: `trainer.batch_size` prompts make one step, cut by `trainer.micro_batch_tokens`"
_CHAT = "a row holds `messages` (a chat) or `prompt` (text); the column names are fixed"
_REWARD = '`data.reward` = "module:function"'
_ENGINE_ARGS = "an argument of vLLM: `rollout.engine_args` = [\"--{}\"] with `rollout.engine` = 'vllm'"
_ADAPTERS = "a [student.lora] table turns adapters on (`student.lora.rank`, `student.lora.alpha`, `student.lora.targets`)"
_LOG = "metrics are written every step; `run.loggers` adds other loggers"
_HUB = "nothing is pushed by a run; `understudy export RUN OUT --push ORG/NAME` uploads a student"
_RESUME = "a run is continued by `understudy resume RUN`"
_SHARDING = "the student is sharded by FSDP2 over `trainer.ranks` processes; there are no other strategies"
_FIXED_ADAM = "AdamW's betas (0.9, 0.999) and epsilon (1e-8) are fixed"
_ONE_TABLE = "each teacher is a table: `teachers.NAME.model`"
_ON_POLICY = "`rollout.off_policy` (1 − λ) takes a share of answers from the data, `loss.sft_coef` adds cross-entropy on them"
_TEACHERS_ANSWERS = (
    "teachers score and never generate: `understudy eval TEACHER --answers FILE` writes a teacher's answers once, and "
    "`rollout.off_policy` with `rollout.answer_column` = 'written' learns from them"
)
_EVAL_FIRST = (
    "with `data.eval` and `data.reward` a run always evaluates before the first step and after the last one"
)
_PROJECT = "wandb reads the environment variables WANDB_PROJECT and WANDB_ENTITY; `run.name` names the run"
_CLIP = "`loss.clip_low` and `loss.clip_high` bound the ratio on either side"
_GPUS = "`trainer.ranks` are the processes (GPUs) that train the student; pools of GPUs are `cluster.pools.NAME.gpus_per_node`"
_NOT_LENT = (
    "it was removed: a trainer that waits for rows no longer generates some itself, which was never measured to help; add engines "
    "(`rollout.processes`, `rollout.replicas`) or raise `rollout.max_batch`"
)
_NOT_DIVIDED = "it was removed: measured, dividing a shared GPU does not help; leave it out"
_OVERLONG = "`data.overlong` = 'drop' leaves out prompts longer than `data.max_prompt_tokens` or the context, 'truncate_left' cuts them"

_CALLED: dict[str, str] = {
    # Length and batch sizes: HF Trainer, TRL, ms-swift, prime-rl, OpenRLHF, verl.
    "trainer.learning_rate": "lr actor_learning_rate",
    "critic.learning_rate": "critic.lr critic.optim.lr critic_learning_rate",
    "trainer.steps": "max_steps train_steps num_steps total_steps total_training_steps num_training_steps",
    _PASSES: "epoch n_epochs num_epochs total_epochs num_train_epochs num_episodes",
    "trainer.epochs": "max_epochs ppo_epochs num_iterations",
    "trainer.batch_size": (
        "train_batch_size gen_batch_size global_batch_size rollout_batch_size generation_batch_size "
        "prompts_per_step"
    ),
    "`trainer.batch_size` counts prompts per step over all devices; " + _MICRO: "per_device_train_batch_size",
    "held-out answers are decoded `rollout.max_batch` at a time": "per_device_eval_batch_size val_batch_size",
    _ACCUMULATION: "gradient_accumulation_steps steps_per_generation",
    "trainer.mini_batch_size": "ppo_mini_batch_size minibatch_size",
    _MICRO: (
        "micro_batch_size micro_train_batch_size micro_rollout_batch_size ppo_micro_batch_size "
        "ppo_micro_batch_size_per_gpu log_prob_micro_batch_size_per_gpu use_dynamic_bsz"
    ),
    "trainer.micro_batch_tokens": "ppo_max_token_len_per_gpu log_prob_max_token_len_per_gpu max_tokens_per_gpu",
    # The optimizer.
    "trainer.optimizer": "optim",
    "trainer.schedule": "lr_scheduler lr_scheduler_type lr_schedule warmup_style",
    "trainer.warmup_steps": "warmup num_warmup_steps lr_warmup_steps",
    "`trainer.warmup_steps` counts steps, not a share of them": "warmup_ratio lr_warmup_steps_ratio",
    "trainer.grad_clip": "max_grad_norm max_norm gradient_clipping clip_grad",
    _FIXED_ADAM: "adam_beta1 adam_beta2 adam_betas betas adam_epsilon",
    "trainer.offload_optimizer": "adam_offload optimizer_offload",
    "weights stay on the device; masters and moments move to the host with `trainer.offload_optimizer`": "param_offload",
    # Checkpoints, evaluation, logs.
    "trainer.checkpoint_every": "save_steps save_freq save_every save_interval ckpt.interval checkpoint_interval",
    "`trainer.checkpoint_every` counts steps; there is no other strategy": "save_strategy",
    "trainer.keep_checkpoints": "save_total_limit max_actor_ckpt_to_keep max_ckpt_num ckpt.keep ckpt.keep_last",
    "`trainer.keep_best`, and `understudy export RUN OUT --best` takes that checkpoint": "load_best_model_at_end",
    "`trainer.keep_best` goes by `val/accuracy`": "metric_for_best_model",
    "trainer.eval_every": "eval_steps eval_interval eval.interval eval_freq test_freq val_every",
    "`trainer.eval_every` counts steps; there is no other strategy": "eval_strategy evaluation_strategy",
    _EVAL_FIRST: "eval_on_start val_before_train",
    "`understudy eval MODEL` measures a model without training": "val_only",
    "trainer.eval_k": "val_kwargs.n",
    "`trainer.eval_k` samples are drawn at `rollout.temperature`; accuracy uses greedy answers": "val_kwargs.temperature",
    "accuracy uses greedy answers; `trainer.eval_k` draws samples besides": "val_kwargs.do_sample",
    _LOG: "logging_steps logging_dir log_freq log_level",
    "run.loggers": "logger report_to use_wandb wandb",
    _PROJECT: "project_name project wandb_project wandb_entity",
    "run.name": "experiment_name run_name wandb_name",
    "run.dir": "output_dir default_local_dir save_path ckpt_path",
    _RESUME: "resume_mode resume_from_path resume_from_checkpoint",
    _HUB: "push_to_hub hub_model_id",
    "run.seed": "data_seed",
    "run.determinism": "full_determinism deterministic",
    # Models.
    "student.model": (
        "model_name_or_path model_name model_path model.path model.name student.path student.name "
        "student_model pretrain"
    ),
    "`student.model` is the student, `teachers.NAME.model` a teacher": "model",
    _ONE_TABLE: "teacher teacher_model teacher_model_path teacher_model_name_or_path",
    "teachers have names: `teachers.NAME.model`, in a table [teachers.NAME]": "teachers.model",
    "teachers.NAME.model": "teachers.*.path teachers.*.model_path teachers.*.name teacher_models.*.model_path",
    "teachers.NAME.urls": "teachers.*.url",
    "teachers.NAME.replicas": "teachers.*.num_replicas teacher_models.*.num_replicas",
    "teachers.NAME.tensor_parallel": "teachers.*.tensor_parallel_size teachers.*.tp teacher_models.*.inference.tensor_model_parallel_size",
    "teachers.NAME.context_length": "teachers.*.max_length teachers.*.max_model_len teacher_models.*.inference.max_model_len",
    "a teacher scores and does not sample; `loss.teacher_temperature` sharpens or flattens it in the loss": "teachers.*.temperature",
    "teachers.NAME.key": "teachers.*.data_source teacher_models.*.key",
    "mixtures of teachers are given per row, in the column that `data.mixture_key` names": "teachers.*.weight",
    "a running server is a teacher with `teachers.NAME.placement` = 'external' and `teachers.NAME.urls`": "teacher_model_server",
    "data.teacher_key": "teacher_tag_key distillation.teacher_key",
    "reference.model": "ref_model reference_model",
    "student.dtype": "torch_dtype model_dtype precision",
    "`student.dtype` = 'bfloat16'; masters and moments stay float32": "bf16",
    "`student.dtype` = 'bfloat16'; float16 is refused for what is trained": "fp16",
    "student.attention": "attn_implementation attn_impl model.attn flash_attn use_flash_attn",
    "student.compile": "torch_compile",
    "student.gradient_checkpointing": "activation_checkpointing enable_gradient_checkpointing use_gradient_checkpointing",
    "rows are packed without padding wherever the model's attention allows it; nothing needs to be set": "use_remove_padding packing",
    "fused losses are on by themselves; `loss.backend` chooses between torch and Triton": "use_liger_kernel",
    _SHARDING: "deepspeed zero_stage fsdp fsdp_config strategy",
    _GPUS: "n_gpus_per_node num_gpus",
    "machines are `cluster.pools.NAME.nodes`, with `cluster.backend` = 'ray'": "nnodes",
    "student.lora.rank": "lora.r lora_r lora_rank",
    "student.lora.alpha": "lora_alpha",
    "student.lora.targets": "target_modules lora_target_modules",
    "adapters have no dropout; " + _ADAPTERS: "lora_dropout lora.dropout",
    _ADAPTERS: "use_peft peft_config train_type tuner_type",
    # Rollouts.
    "rollout.n": "num_generations n_samples_per_prompt rollouts_per_example group_size num_return_sequences",
    "rollout.max_new_tokens": (
        "max_tokens max_completion_length max_response_length response_length generate_max_len "
        "max_completion_tokens"
    ),
    "`rollout.max_new_tokens` bounds a response, `rollout.context_length` prompt and all turns together": "max_length",
    "rollout.context_length": "max_seq_length max_seq_len seq_len max_model_len",
    "data.max_prompt_tokens": "max_prompt_length prompt_length prompt_max_len",
    _OVERLONG: "filter_overlong_prompts truncation truncation_side",
    "rollout.engine": "rollout.name",
    "`rollout.engine` = 'vllm'": "use_vllm",
    "`rollout.engine` = 'vllm' starts its own servers, or uses those at `rollout.urls`": "vllm_mode",
    "rollout.urls": "vllm_server_host vllm_server_base_url",
    "rollout.replicas": "vllm_num_engines",
    _ENGINE_ARGS.format(
        "tensor-parallel-size=2"
    ): "tensor_model_parallel_size rollout.tensor_parallel_size vllm_tensor_parallel_size",
    _ENGINE_ARGS.format("gpu-memory-utilization=0.4"): "gpu_memory_utilization vllm_gpu_memory_utilization",
    _ENGINE_ARGS.format("enforce-eager"): "enforce_eager",
    _ENGINE_ARGS.format("max-num-batched-tokens=8192"): "max_num_batched_tokens",
    "rollout.max_batch": "max_num_seqs",
    "engines are never put to sleep; nothing needs to be set": "free_cache_engine",
    "rollout.stop": "stop_strings",
    "rollout.agent": "default_agent_loop",
    "rollout.workers": "agent.num_workers",
    "rollout.template_options": "chat_template_kwargs",
    "rows with `messages` go through the chat template, rows with `prompt` do not": "apply_chat_template",
    "`rollout.agent_options` has the tool loop's `max_turns`: [rollout.agent_options.tool]": "max_assistant_turns",
    "`rollout.agent_options` has the tool loop's `tools`: [rollout.agent_options.tool]": "tool_config_path",
    "rollout.filter_groups": "dynamic_filtering filter_groups.enable",
    "rollout.max_refills": "max_num_gen_batches",
    "`rollout.overlong` = 'drop'": "mask_truncated_completions",
    "rollout.overlong_buffer": "overlong_buffer.len overlong_buffer_cfg.len",
    "rollout.overlong_penalty": "overlong_buffer.penalty_factor overlong_buffer_cfg.penalty_factor",
    "`trainer.mode` = 'fully_async'": "async_train",
    "trainer.max_staleness": "max_async_level staleness_threshold",
    "trainer.sync_every": "trigger_parameter_sync_step",
    "trainer.partial_rollouts": "partial_rollout",
    _NOT_LENT: "lend_after",
    _NOT_DIVIDED: "gpu_share",
    "cluster.restarts.teacher": "teachers.*.restarts",
    # Data and rewards.
    "data.train": (
        "train_files train_file data.path data.files dataset dataset_name dataset_path train_dataset "
        "prompt_data"
    ),
    "data.eval": "val_files val_file data.val data.test eval_dataset val_dataset",
    _CHAT: "prompt_key input_key return_raw_chat",
    "rewards read the `answer` column; your own (`data.reward`) may read any column": "label_key",
    _REWARD: (
        "reward_funcs reward_fn reward_function reward_model reward_manager remote_rm_url reward_pretrain reward_fn_key "
        "custom_reward_function.path custom_reward_function.name"
    ),
    "`run.rollout_dump_every` writes the rows of every N-th step as text to the run directory": "rollout_data_dir",
    # The objective.
    "loss.kind": "loss_mode divergence loss.type loss.name",
    "`loss.kind` is the divergence, `loss.reduction` how tokens are averaged": "loss_type",
    "`loss.student_temperature` and `loss.teacher_temperature` are of the loss, `rollout.temperature` of sampling": "loss.temperature",
    "loss.topk": "gkd_logits_topk loss.k",
    "loss.policy_gradient": "use_policy_gradient",
    "loss.distill_coef": "distillation_loss_coef teacher_tau",
    "`loss.task_coef` above 0 adds a policy loss on task rewards; the default, 0, distils alone": "use_task_rewards",
    "loss.per_token_clamp": "jsd_token_clip",
    "loss.loss_max_clamp": "loss_max_clamp",
    "loss.log_prob_min_clamp": "log_prob_min_clamp",
    _ON_POLICY: "lmbda sft_alpha",
    _TEACHERS_ANSWERS: "seq_kd off_policy_from",
    "loss.reduction": "loss_agg_mode",
    "loss.advantage": "adv_estimator advantage_estimator",
    "loss.lam": "lambd",
    "`loss.advantage` = 'grpo_no_std' does not divide by the standard deviation": "norm_adv_by_std_in_grpo scale_rewards",
    _CLIP: "clip_ratio cliprange epsilon eps_clip",
    "loss.clip_low": "clip_ratio_low",
    "loss.clip_high": "clip_ratio_high epsilon_high",
    "loss.dual_clip": "clip_ratio_c",
    "critic.value_clip": "cliprange_value",
    "critic.only_steps": "critic_warmup",
    "loss.kl_coef": "kl_loss_coef init_kl_coef kl_tau kl_ctrl.kl_coef",
    "loss.kl_kind": "kl_loss_type kl_penalty kl_estimator",
    "`loss.kl_coef` above 0 keeps the student near a reference; `loss.kl_in` says where": "use_kl_loss",
    "`loss.kl_in` = 'reward' takes `loss.kl_coef` × KL to a reference off the task reward": "use_kl_in_reward",
    "there is no entropy bonus": "entropy_coeff entropy_coef",
    "loss.correction.weigh": "rollout_is",
    "loss.correction.cap": "rollout_is_threshold",
    "loss.correction.drop": "rollout_rs",
    # verl's distillation, by teacher.
    "a recipe with a [teachers.NAME] table distils; without one, and with `loss.task_coef` above 0, it learns from rewards alone": "distillation.enabled",
    "teachers are scored by servers of our own; a running vLLM: `teachers.NAME.placement` = 'external'": "teacher_models.*.inference.name",
    "teachers.NAME.max_batch_tokens": "teacher_models.*.inference.max_num_batched_tokens",
    "a teacher only scores and keeps no KV cache; `teachers.NAME.max_batch_tokens` bounds its memory": "teacher_models.*.inference.gpu_memory_utilization",
    "a teacher scores and does not sample; `loss.teacher_temperature` is of the loss": "teacher_models.*.inference.temperature",
    "teachers' GPUs: `cluster.pools.NAME.gpus_per_node`, with `teachers.NAME.pool`; else each takes its own": "distillation.n_gpus_per_node",
    "teachers' machines: `cluster.pools.NAME.nodes`, with `teachers.NAME.pool`": "distillation.nnodes",
    "teachers always have their own processes; for a pool of their own: `teachers.NAME.placement` = 'pool'": "enable_resource_pool",
    "teachers score each rollout as soon as it ends; nothing needs to be set": "stream_teacher_with_rollout",
}
"""Our key, or a sentence → the names that users of other projects write for it."""

KEYS = {name: answer for answer, names in _CALLED.items() for name in names.split()}

_VERL = "docs/coming-from-verl.md lists verl's keys and ours"
FAMILIES: dict[str, str] = {
    "actor_rollout_ref": _VERL,
    "algorithm": _VERL,
    "distillation": _VERL,
    "async_training": _VERL,
    "reward": _VERL,
    "custom_reward_function": _VERL,
    "orchestrator": "rollouts are in [rollout], what they are made from in [data]",
    "inference": "engines are in [rollout], teachers in [teachers.NAME]",
    "env": "a `verifiers` environment is `rollout.agent` = 'verifiers', with [rollout.agent_options.verifiers]",
    "sampling": "sampling is in [rollout]",
    "optimizer": "the optimizer is in [trainer]",
    "optim": "the optimizer is in [trainer]",
    "training": "training is in [trainer]",
    "train": "training is in [trainer]",
    "model": "the student is in [student], teachers in [teachers.NAME]",
    "teacher": _ONE_TABLE,
    "lora": _ADAPTERS,
}
"""First part of a path → the message for keys under it that `KEYS` does not have."""

REMOVED: dict[str, Any] = {
    "trainer.lend_after": None,
    "student.gpu_share": 1.0,
    "teachers.*.gpu_share": 1.0,
    "teachers.*.restarts": 5,
}
"""Keys of earlier versions → their defaults. Run directories of those versions list them."""

OFF: dict[str, str] = {
    "rollout.top_k": "write 0, which keeps every token (-1 in verl and vLLM)",
    "trainer.eval_every": "write 0, which evaluates only before the first and after the last step",
    "trainer.eval_samples": "leave it out to evaluate on all",
    "trainer.checkpoint_every": "write trainer.steps or more: the last step is always saved",
}
"""Keys whose like in other projects is turned off by -1 → what to write here."""

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
VALUES: dict[str, dict[str, str]] = {
    "dtype": _DTYPES,
    "trainer.mode": {
        "async": "fully_async",
        "asynchronous": "fully_async",
        "one_step_off": "fully_async",
        "on_policy": "sync",
        "synchronous": "sync",
    },
    "trainer.schedule": {
        "constant_with_warmup": "constant",
        "cosine_with_min_lr": "cosine",
        "cosine_with_restarts": "cosine",
        "none": "constant",
    },
    "trainer.optimizer": {
        "adam": "adamw",
        "adamw_torch": "adamw",
        "adamw_torch_fused": "adamw",
        "paged_adamw_8bit": "adamw_8bit",
        "adamw_bnb_8bit": "adamw_8bit",
        "adam_8bit": "adamw_8bit",
    },
    "loss.kind": {
        "forward_kl_topk": "forward_kl",
        "fkl": "forward_kl",
        "forward": "forward_kl",
        "reverse_kl_topk": "reverse_kl",
        "rkl": "reverse_kl",
        "reverse": "reverse_kl",
        "js": "jsd",
        "jsd_topk": "jsd",
        "jensen_shannon": "jsd",
        "gkd": "jsd",
        "l2": "mse",
        "tv": "tvd",
        "total_variation": "tvd",
    },
    "loss.signal": {"top_k": "topk", "logits": "hidden", "full": "hidden", "token": "sampled", "logprob": "sampled"},
    "loss.advantage": {
        "group_norm": "grpo",
        "dr_grpo": "grpo_no_std",
        "reinforce_plus_plus": "reinforce++",
        "ppo": "gae",
    },
    "loss.reduction": {
        "token": "token-mean",
        "mean": "token-mean",
        "sequence": "seq-mean-token-mean",
        "seq-mean": "seq-mean-token-mean",
        "dr_grpo": "seq-mean-token-sum",
    },
    "rollout.engine": {"transformers": "hf", "huggingface": "hf", "local": "hf", "native": "hf"},
    "rollout.agent": {"single_turn_agent": "single_turn", "tool_agent": "tool"},
    "cluster.backend": {"process": "local", "single": "local"},
    "dataplane.backend": {"tq": "transfer_queue", "transferqueue": "transfer_queue", "memory": "embedded"},
    "run.determinism": {"true": "full", "false": "fast", "on": "full", "off": "fast", "bitwise": "full"},
    "run.loggers": {"tb": "tensorboard", "weights_and_biases": "wandb"},
}  # fmt: skip
"""End of a key's path → what users write there → the value it is here."""
