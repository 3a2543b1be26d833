"""Makes the student of this recipe: weak at the quickstart's problems, and with another tokenizer than its teachers.

    python recipes/other-tokenizer/make_model.py [--out DIR]

    "54+86="  ->  teachers  5 4 + 8 6 =      one token per character, as in the quickstart
                  student   54 + 86 =        pairs of digits and some pairs of letters are one token

The student also has other ids, other special tokens and another chat template. It sees the right answers of 300 small
batches, so that it knows the form of an answer. About a minute on one CPU core. The held-out problems are read once, for
the figures printed at the end.
"""

import argparse
import sys
from itertools import product
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

sys.path.append(str(Path(__file__).resolve().parents[1] / "quickstart"))
from make_models import build_model
from sft import SupervisedSchedule, accuracy, train
from task import make_splits
from transformers import GenerationConfig
from vocabulary import CHARACTERS, CONTEXT

SCHEDULE = SupervisedSchedule(steps=300, rows={"add": 32, "sort": 8}, seed=6)
SPECIALS = ("<|end|>", "<|ask|>", "<|reply|>", "<|none|>")
TEMPLATE = (
    "{%- for message in messages -%}{{- ('<|ask|>' if message['role'] == 'user' else '<|reply|>') + message['content'] -}}"
    "{%- if message['role'] == 'assistant' -%}{{- '<|end|>' -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|reply|>' -}}{%- endif -%}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    letters = CHARACTERS[10:36]
    merges = [*product("0123456789", repeat=2), *zip(letters[::2], letters[1::2], strict=True)]
    tokens = [*reversed(CHARACTERS), *("".join(pair) for pair in merges), *SPECIALS]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(BPE(vocab=vocab, merges=merges, unk_token="<|none|>"))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|end|>",
        pad_token="<|none|>",
        unk_token="<|none|>",
        additional_special_tokens=["<|ask|>", "<|reply|>"],
        chat_template=TEMPLATE,
        model_max_length=CONTEXT,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "models" / "student")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, SCHEDULE.seed)
    splits = make_splits()
    train(model, tokenizer, {name: split.sft for name, split in splits.items()}, SCHEDULE)
    arguments.out.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)
    model.eval()
    for name, split in splits.items():
        print(f"{name}: {accuracy(model, tokenizer, split.test):.1%}")


if __name__ == "__main__":
    main()
