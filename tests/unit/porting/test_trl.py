"""Recipes from TRL's DistillationConfig, GKDConfig and GOLDConfig, in every form in which users write them."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from understudy.cli.main import main
from understudy.config.base import flatten
from understudy.config.recipe import parse_recipe
from understudy.errors import ConfigError
from understudy.planning.objective import describe
from understudy.porting.recipe_draft import Draft, Verdict
from understudy.porting.sources import Source
from understudy.porting.trl import from_trl
from understudy.porting.trl_sources import read_trl

MODELS: dict[str, Any] = {
    "model_name_or_path": "org/s",
    "teacher_model_name_or_path": "org/t",
    "dataset_name": "org/rows",
}


def draft_of(program: str, **keys: Any) -> Draft:
    return from_trl(Source(keys=MODELS | keys, program=program))


def recipe_of(program: str, **keys: Any) -> dict[str, Any]:
    """The recipe's dotted keys, after a check that its objective exists."""
    draft = draft_of(program, **keys)
    tables = tomllib.loads(draft.toml())
    describe(parse_recipe(tables).loss)
    return flatten(tables)


@pytest.mark.parametrize(
    ("program", "keys", "wanted"),
    [
        ("DistillationConfig", {}, {"loss.kind": "reverse_kl", "loss.signal": "hidden", "rollout.top_p": 0.95, "rollout.max_new_tokens": 512,
                                    "trainer.learning_rate": 1e-6, "trainer.schedule": "linear", "student.dtype": "bfloat16", "trainer.passes": 3.0}),
        ("GKDConfig", {}, {"loss.kind": "jsd", "loss.beta": None, "rollout.temperature": 0.9, "rollout.off_policy": 0.5, "rollout.answer_column": "completion", "loss.student_temperature": None,
                           "rollout.max_new_tokens": 128, "rollout.top_p": None, "trainer.learning_rate": 2e-5}),
        ("GKDConfig", {"beta": 0.1}, {"loss.kind": "jsd", "loss.beta": 0.1}),
        ("GKDConfig", {"beta": 1.0, "loss_top_k": 16}, {"loss.signal": "at_ids", "rollout.off_policy": None, "rollout.answer_column": None}),
        ("GKDConfig", {"lmbda": 1.0}, {"rollout.off_policy": None, "rollout.answer_column": None}),
        ("gkd.py", {"beta": 0.0}, {"loss.kind": None, "loss.beta": None}),
        ("DistillationConfig", {"temperature": 0.7}, {"rollout.temperature": 0.7, "loss.student_temperature": 0.7, "loss.teacher_temperature": 0.7}),
        ("DistillationConfig", {"beta": 0.0, "loss_top_k": 16, "loss_add_tail": False}, {"loss.signal": None, "loss.topk": 16, "loss.tail": "renormalise"}),
        ("DistillationConfig", {"beta": 1.0, "loss_top_k": 16, "top_p": 1.0}, {"loss.signal": "at_ids", "loss.topk": 16, "loss.tail": None}),
        ("DistillationConfig", {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8, "num_generations": 2, "num_processes": 4},
         {"trainer.batch_size": None, "rollout.n": 2, "trainer.ranks": 4}),
        ("DistillationConfig", {"max_steps": 50, "warmup_ratio": 0.1}, {"trainer.steps": 50, "trainer.warmup_steps": 5, "trainer.passes": None}),
        ("DistillationConfig", {"max_steps": 33, "warmup_ratio": 0.1, "lr_scheduler_type": "cosine_with_min_lr"}, {"trainer.warmup_steps": 4, "trainer.schedule": "cosine"}),
        ("DistillationConfig", {"use_peft": True, "lora_r": 64, "lora_target_modules": ["q_proj"]}, {"student.lora.rank": 64, "student.lora.targets": ["q_proj"]}),
        ("DistillationConfig", {"use_vllm": True, "vllm_tensor_parallel_size": 2},
         {"rollout.engine": "vllm", "rollout.engine_args": ["--gpu-memory-utilization=0.3", "--tensor-parallel-size=2"]}),
        ("DistillationConfig", {"optim": "paged_adamw_8bit", "report_to": ["wandb"], "log_completions": True},
         {"trainer.optimizer": "adamw_8bit", "run.loggers": ["wandb"], "run.rollout_dump_every": 100}),
        ("DistillationConfig", {"dataset_config": "main", "dataset_train_split": "test"}, {"data.train": "org/rows/main:test"}),
        ("DistillationConfig", {"dataset_name": "rows.jsonl"}, {"data.train": "rows.jsonl"}),
        ("GOLDConfig", {}, {"loss.kind": "jsd", "loss.signal": "hidden", "rollout.off_policy": 0.5, "rollout.max_new_tokens": 128, "rollout.top_p": 0.95,
                            "rollout.temperature": 0.9, "loss.student_temperature": 0.9, "loss.teacher_temperature": 0.9, "trainer.learning_rate": 1e-7}),
        ("gold.py", {"use_vllm": True, "max_completion_length": 64}, {"rollout.engine_args": ["--gpu-memory-utilization=0.9"], "rollout.max_new_tokens": 64}),
        ("GOLDTrainer", {"use_uld_loss": True, "lmbda": 1.0}, {"teachers.teacher.vocabulary": "align", "loss.signal": None, "loss.student_temperature": None, "rollout.temperature": 0.9}),
        ("ServerDistillationConfig", {}, {"loss.signal": "at_ids", "loss.topk": 1}),
        ("DistillationConfig", {"loss_add_tail": True}, {"loss.signal": "at_ids", "loss.topk": 1}),
        ("GKDConfig", {"teacher_model_init_kwargs": {"dtype": "float16"}, "model_init_kwargs": {"attn_implementation": "sdpa"}}, {"teachers.teacher.dtype": "float16", "student.attention": "sdpa"}),
        ("train.py", {"seq_kd": False}, {"loss.kind": "jsd", "trainer.learning_rate": 2e-5}),
    ],
)  # fmt: skip
def test_trl_settings_and_defaults_become_recipe_keys(
    program: str, keys: dict[str, Any], wanted: dict[str, Any]
) -> None:
    found = recipe_of(program, **keys)
    assert {key: found.get(key) for key in wanted} == wanted


def test_a_note_explains_how_a_chat_that_ends_with_its_answer_is_read() -> None:
    notes = draft_of("GKDConfig").notes
    assert any("answers what comes before it" in one for one in notes) and not any(
        "refused" in one for one in notes
    )


def test_use_peft_alone_gives_lora_with_the_default_rank() -> None:
    assert recipe_of("DistillationConfig", use_peft=True)["student.lora.rank"] == 16


@pytest.mark.parametrize(
    ("key", "value", "wanted", "text"),
    [
        ("lmbda", 0.7, Verdict.CARRIED, "rollout.off_policy = 0.3"),
        ("lmbda", 1.0, Verdict.IMPLIED, "student's own"),
        ("seq_kd", True, Verdict.UNSUPPORTED, "student's own"),
        ("seq_kd", False, Verdict.NOT_NEEDED, "off"),
        ("adam_beta2", 0.95, Verdict.UNSUPPORTED, "0.999"),
        ("adam_beta2", 0.999, Verdict.NOT_NEEDED, "what happens here"),
        ("teacher_model_server_url", "http://h:1", Verdict.UNSUPPORTED, "serve-teacher"),
        ("load_in_4bit", True, Verdict.UNSUPPORTED, "unquantised"),
        ("push_to_hub", True, Verdict.UNSUPPORTED, "understudy export"),
        ("max_length", 1024, Verdict.NOT_NEEDED, "data.max_prompt_tokens"),
        ("lr_scheduler_type", "polynomial", Verdict.UNSUPPORTED, "trainer.schedule"),
        ("brand_new_key", 3, Verdict.UNSUPPORTED, "not known"),
    ],
)
def test_each_key_gets_a_verdict_with_an_explanation(
    key: str, value: Any, wanted: Verdict, text: str
) -> None:
    draft = draft_of("GKDConfig", **{key: value})
    assert draft.entries[key].verdict is wanted and text in draft.entries[key].text
    assert draft.problems() == []


PYTHON = """
from trl.experimental.gkd import GKDConfig, GKDTrainer
args = GKDConfig(output_dir="out", beta=0.2, learning_rate=3e-5, seed=make_seed(), lmbda=1.0)
trainer = GKDTrainer(model="org/s", teacher_model="org/t", args=args, train_dataset=rows)
"""


def test_every_form_of_a_trl_configuration_gives_the_same_keys(tmp_path: Path) -> None:
    keys = {"beta": 0.2, "learning_rate": 3e-5, "lmbda": 1.0}
    (tmp_path / "train.py").write_text(PYTHON)
    (tmp_path / "a.json").write_text(json.dumps(keys))
    (tmp_path / "a.yaml").write_text("beta: 0.2\nlearning_rate: 3e-5\nlmbda: 1.0\n")
    (tmp_path / "a.sh").write_text(
        "LR=3e-5\naccelerate launch gkd.py \\\n  --beta 0.2 --learning_rate $LR --lmbda=1.0 --bf16\n"
    )
    (tmp_path / "b.sh").write_text(f"python gkd.py --config {tmp_path}/a.yaml --lmbda 1.0\n")
    sources = [[str(tmp_path / name)] for name in ("train.py", "a.json", "a.yaml", "a.sh", "b.sh")]
    sources += [["GKDConfig(beta=0.2, learning_rate=3e-5, lmbda=1.0)"]]
    sources += [["python", "gkd.py", "--beta", "0.2", "--learning_rate=3e-5", "--lmbda", "1.0"]]
    sources += [["python gkd.py --beta 0.2 --learning_rate 3e-5 --lmbda 1.0"]]
    for arguments in sources:
        found = read_trl(arguments)
        assert {key: found.keys.get(key) for key in keys} == keys, arguments
    script = read_trl([str(tmp_path / "train.py")])
    assert script.program == "GKDConfig GKDTrainer" and script.keys["model"] == "org/s"
    assert any("seed=make_seed()" in note for note in script.notes) and any(
        "train_dataset=rows" in note for note in script.notes
    )
    assert from_trl(script).tables["student"]["model"] == "org/s"


NAMES = """
import torch
from peft import LoraConfig
NAME, BATCH = "org/s", 4
MODEL = "org/s"
LR: float = 2 * 1e-5
rows = load_dataset("org/rows", "main", split="train[:64]")
rows = rows.map(as_prompt).filter(lambda row: row["ok"])
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16)
teacher = AutoModelForCausalLM.from_pretrained(f"{MODEL}-big")
adapters = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj"], task_type="CAUSAL_LM")
sampling = GenerationConfig(temperature=0.1, max_new_tokens=7)
args = GOLDConfig("out", learning_rate=LR, per_device_train_batch_size=2, model_init_kwargs={"dtype": torch.bfloat16})
GOLDTrainer(model, teacher, args=args, train_dataset=rows, processing_class=tokenizer, peft_config=adapters)
"""


def test_variables_in_a_python_file_are_resolved(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(NAMES)
    source = read_trl([str(tmp_path / "a.py")])
    wanted = {
        "model": "org/s",
        "teacher_model": "org/s-big",
        "learning_rate": 2e-5,
        "output_dir": "out",
        "dataset_name": "org/rows",
        "dataset_config": "main",
        "dataset_train_split": "train[:64]",
        "use_peft": True,
        "lora_r": 8,
        "lora_target_modules": ["q_proj"],
    }
    assert {key: source.keys.get(key) for key in wanted} == wanted
    assert "temperature" not in source.keys and "task_type" not in source.keys and "r" not in source.keys
    assert any(".map, .filter" in note for note in source.notes)
    assert from_trl(source).tables["student"]["lora"]["rank"] == 8


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ('load_dataset("json", data_files="rows.jsonl")["train"]', {"dataset_name": "rows.jsonl", "dataset_train_split": "train"}),
        ('load_dataset(path="org/rows", split="test")', {"dataset_name": "org/rows", "dataset_train_split": "test"}),
        ("make_rows()", {}),
        ("load_dataset(argv[1])", {}),
        ("a)\na = b\nb = a\nprint(a", {}),
    ],
)  # fmt: skip
def test_dataset_keys_are_read_from_load_dataset_in_a_python_file(rows: str, wanted: dict[str, Any]) -> None:
    source = read_trl([f"GKDTrainer(model='a', train_dataset={rows})"])
    assert {key: value for key, value in source.keys.items() if key.startswith("dataset")} == wanted
    assert wanted or any("set data.train yourself" in note for note in source.notes)


@pytest.mark.parametrize(
    ("words", "processes"),
    [
        (["accelerate", "launch", "--config_file", "four.yaml", "--mixed_precision", "bf16", "gkd.py"], 4),
        (["accelerate", "launch", "--num_processes", "2", "--config_file", "four.yaml", "gkd.py"], 2),
        (["torchrun", "--nproc_per_node=3", "--nnodes", "2", "gkd.py"], 6),
        (["deepspeed", "--num_gpus", "5", "gkd.py"], 5),
        (["trl", "gkd", "--accelerate_config", "zero3"], 8),
        (["trl", "gkd", "--accelerate_config", "four.yaml", "--num_processes", "2"], 2),
        (["trl", "gkd", "--config", "mine.yaml"], 4),
        (["python", "gkd.py"], None),
    ],
)
def test_the_number_of_processes_is_read_from_every_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], processes: int | None
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "four.yaml").write_text("distributed_type: FSDP\nnum_processes: 4\n")
    (tmp_path / "mine.yaml").write_text(
        "accelerate_config: four.yaml\nenv: {CUDA_VISIBLE_DEVICES: 0}\nbeta: 0.2\n"
    )
    flags = [
        "--model_name_or_path",
        "org/s",
        "--no_gradient_checkpointing",
        "--report_to",
        "wandb",
        "trackio",
    ]
    source = read_trl([*words, *flags])
    assert source.keys.get("num_processes") == processes and source.keys["report_to"] == ["wandb", "trackio"]
    draft = from_trl(source)
    assert draft.tables["trainer"].get("ranks", 1) == (processes or 1)
    assert "gradient_checkpointing" not in draft.tables["student"]
    launcher = [entry for key, entry in draft.entries.items() if key.startswith(("launcher.", "env."))]
    assert all(entry.verdict is Verdict.NOT_NEEDED for entry in launcher)


def test_a_missing_file_of_the_launcher_is_named_in_a_note() -> None:
    notes = read_trl(["accelerate", "launch", "--config_file", "none.yaml", "gkd.py", "--beta", "0.1"]).notes
    assert any("none.yaml was not found" in note for note in notes)


def test_the_training_command_of_a_script_is_read(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("beta: 0.25\n")
    (tmp_path / "a.sh").write_text(
        "pip install trl --upgrade --quiet\n"
        'if [ "${FAST:-no}" = yes ]; then LR=1e-4; else LR=1e-5; fi\n'
        'accelerate launch --num_processes ${N:-2} gkd.py --config c.yaml --learning_rate $LR \\\n  --output_dir out "$@"\n'
        "trl vllm-serve --model out --port 8000\n"
    )
    source = read_trl([str(tmp_path / "a.sh"), "--lmbda", "1.0"])
    wanted = {"beta": 0.25, "learning_rate": 1e-5, "output_dir": "out", "num_processes": 2, "lmbda": 1.0}
    assert source.keys == wanted and source.program == "gkd.py"


@pytest.mark.parametrize(
    ("program", "match"),
    [
        ("GRPOConfig GRPOTrainer", "loss.task_coef"),
        ("MiniLLMConfig", "loss.policy_gradient"),
        ("sdft.py", "model = 'student'"),
        ("SFTTrainer", "not distillation"),
        ("OnlineDPOTrainer", "not distillation"),
        ("IWOPDConfig", "distillation_objective"),
    ],
)
def test_trl_trainers_without_a_translation_are_refused_with_a_hint(program: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        draft_of(program)


def test_a_trainer_that_is_not_named_is_guessed_from_its_keys_with_a_note() -> None:
    assert any("TRL's GOLDConfig" in note for note in draft_of("train.py", use_uld_loss=True).notes)
    assert any("TRL's DistillationConfig" in note for note in draft_of("").notes)


def test_configurations_of_other_programs_are_refused(tmp_path: Path) -> None:
    keys = {"actor_rollout_ref.model.path": "m", "data.train_files": "f", "trainer.nnodes": 1}
    with pytest.raises(ConfigError, match="import-verl"):
        from_trl(Source(keys=keys))
    (tmp_path / "acc.yaml").write_text("compute_environment: LOCAL_MACHINE\nnum_processes: 8\n")
    (tmp_path / "a.py").write_text("parser = TrlParser((GKDConfig, ModelConfig))\n")
    (tmp_path / "b.yaml").write_text("")
    for name, match in (
        ("acc.yaml", "accelerate's file"),
        ("a.py", "from the command line"),
        ("b.yaml", "is empty"),
    ):
        with pytest.raises(ConfigError, match=match):
            read_trl([str(tmp_path / name)])


def test_import_trl_writes_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "recipe.toml"
    arguments = [
        "--model_name_or_path",
        "org/s",
        "--teacher_model_name_or_path",
        "org/t",
        "--dataset_name",
        "org/d",
        "--beta",
        "0.5",
    ]
    assert main(["import-trl", "-o", str(recipe), "--", "python", "distillation.py", *arguments]) == 0
    assert parse_recipe(tomllib.loads(recipe.read_text())).loss.kind == "jsd"
    assert "carried over" in capsys.readouterr().out


def test_import_trl_reports_missing_data_and_a_missing_student(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import-trl", "GKDConfig(beta=0.5)"]) == 2
    output = capsys.readouterr().err
    assert "data.train" in output and "student.model" in output


@pytest.mark.parametrize(
    "arguments", [["missing.py"], ["nothing"], ["print(1)"], ["GKDConfig("], ["python gkd.py now"]]
)
def test_arguments_that_are_no_trl_source_are_refused(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"YAML|Python"):
        read_trl(arguments)


def test_a_colocated_engine_shares_the_training_gpus() -> None:
    found = recipe_of("DistillationConfig", use_vllm=True, num_processes=4, vllm_tensor_parallel_size=2)
    assert found["rollout.devices"] == ["0,1", "2,3"] and found["rollout.replicas"] == 2
    server = draft_of("DistillationConfig", use_vllm=True, vllm_mode="server", vllm_server_host="h")
    assert "devices" not in server.tables["rollout"]
    assert server.entries["vllm_server_host"].verdict is Verdict.UNSUPPORTED
