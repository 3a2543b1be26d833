"""Writes a model folder with its own code: the quickstart's student under its own model type, with another activation
and a tokenizer class."""

from __future__ import annotations

import json
import shutil
from importlib import resources
from pathlib import Path

ASSETS = Path(str(resources.files("understudy.assets") / "quickstart"))

CODE = """
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM


class HouseConfig(Qwen3Config):
    model_type = "house"


class HouseForCausalLM(Qwen3ForCausalLM):
    config_class = HouseConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp.act_fn = torch.nn.GELU()
"""

TOKENIZER = """
from transformers import PreTrainedTokenizerFast


class HouseTokenizer(PreTrainedTokenizerFast):
    pass
"""


def write_house_model(folder: Path, like: str = "student") -> Path:
    shutil.copytree(ASSETS / "models" / like, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "house",
        "architectures": ["HouseForCausalLM"],
        "auto_map": {
            "AutoConfig": "modeling_house.HouseConfig",
            "AutoModelForCausalLM": "modeling_house.HouseForCausalLM",
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_house.py").write_text(CODE)
    file = folder / "tokenizer_config.json"
    own = {
        "tokenizer_class": "HouseTokenizer",
        "auto_map": {"AutoTokenizer": [None, "tokenization_house.HouseTokenizer"]},
    }
    file.write_text(json.dumps(json.loads(file.read_text()) | own))
    (folder / "tokenization_house.py").write_text(TOKENIZER)
    return folder
