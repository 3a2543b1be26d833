"""Makes the teacher of this recipe: a mixture of experts that sorts letters.

    python recipes/mixture-of-experts/make_model.py [--out DIR]

The quickstart's tokenizer, problems and supervised training; a Qwen3-MoE of 4 experts, 2 of them for each token. Minutes on one CPU
core. The held-out problems are read once, for the figure printed at the end.
"""

import argparse
import sys
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

sys.path.append(str(Path(__file__).resolve().parents[1] / "quickstart"))
from make_models import save_model
from sft import SupervisedSchedule, accuracy, train
from task import make_splits
from vocabulary import CONTEXT, build_tokenizer

SCHEDULE = SupervisedSchedule(steps=400, rows={"sort": 128}, seed=5)


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3MoeForCausalLM:
    torch.manual_seed(5)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        moe_intermediate_size=144,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=24,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return Qwen3MoeForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "models" / "teacher-sort")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer, sort = build_tokenizer(), make_splits()["sort"]
    model = build_model(tokenizer)
    train(model, tokenizer, {"sort": sort.sft}, SCHEDULE)
    save_model(model, tokenizer, arguments.out)
    model.eval()
    print(f"sort: {accuracy(model, tokenizer, sort.test):.1%}")


if __name__ == "__main__":
    main()
