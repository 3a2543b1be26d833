"""The quickstart vocabulary: one token per character, saved as an ordinary Hugging Face tokenizer.

A BPE model without merges is exactly a character tokenizer, so `AutoTokenizer` needs no code of ours. Student and
teachers get byte-identical files: distillation compares distributions over the same ids.
"""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

PAD, BOS, EOS, UNK, USER, ASSISTANT = "<pad>", "<bos>", "<eos>", "<unk>", "<user>", "<assistant>"
SPECIALS = (PAD, BOS, EOS, UNK, USER, ASSISTANT)
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz+="
CONTEXT = 128

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}
{{- '<user>' + message['content'] -}}
{%- elif message['role'] == 'assistant' -%}
{{- '<assistant>' + message['content'] + eos_token -}}
{%- else -%}
{{- raise_exception('the quickstart chat knows the roles user and assistant, not ' + message['role']) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<assistant>' -}}
{%- endif -%}
"""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """`<bos><user>12+34=<assistant>` is what a one-question chat renders to; the model writes `64<eos>`."""
    vocab = {token: index for index, token in enumerate([*SPECIALS, *CHARACTERS])}
    backend = Tokenizer(BPE(vocab=vocab, merges=[], unk_token=UNK))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes tokenizer.json, chat_template.jinja and a tokenizer_config.json that older transformers read too.

    transformers 5 would write its own class name and list of extra tokens, which transformers 4 refuses.
    """
    tokenizer.save_pretrained(folder)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "unk_token": UNK,
        "additional_special_tokens": [USER, ASSISTANT],
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
        "padding_side": "left",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
