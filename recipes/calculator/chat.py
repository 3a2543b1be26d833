"""The calculator chat's tokenizer: one token per character, tool calls in the Hermes format.

    <bos><user>347 times 86 minus 12<assistant>
    <tool_call>{"name": "calculator", "arguments": {"expression": "347*86-12"}}</tool_call><eos>
    <tool>29830<assistant>29830<eos>

The words every call is made of are tokens of their own, as in the vocabularies of real models: `<tool_call>`, the keys,
the operators' names. They are ordinary tokens, not special ones, because a tool parser must see them.
"""

import json
import string
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
ROLES = ("<user>", "<assistant>", "<tool>")
SPECIALS = (PAD, BOS, EOS, UNK, *ROLES)
CHARACTERS = [c for c in string.printable if c.isprintable()]
WORDS = (
    "<tool_call>",
    "</tool_call>",
    '"name"',
    '"calculator"',
    '"arguments"',
    '"expression"',
    "plus",
    "minus",
    "times",
)
CONTEXT = 320

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] in ['user', 'tool'] -%}
{{- '<' + message['role'] + '>' + message['content'] -}}
{%- elif message['role'] == 'assistant' -%}
{{- '<assistant>' + message['content'] + eos_token -}}
{%- else -%}
{{- raise_exception('this chat knows the roles user, assistant and tool, not ' + message['role']) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<assistant>' -}}
{%- endif -%}
"""


def call_text(expression: str) -> str:
    """A tool call as the Hermes format has it."""
    call = {"name": "calculator", "arguments": {"expression": expression}}
    return f"<tool_call>{json.dumps(call)}</tool_call>"


def build_tokenizer() -> PreTrainedTokenizerFast:
    vocab = {token: index for index, token in enumerate([*SPECIALS, *CHARACTERS])}
    backend = Tokenizer(BPE(vocab=vocab, merges=[], unk_token=UNK))
    backend.decoder = decoders.Fuse()
    backend.add_tokens([AddedToken(word, normalized=False, special=False) for word in WORDS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        additional_special_tokens=list(ROLES),
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Student and teacher get byte-identical files, with a tokenizer_config.json that older transformers read too."""
    tokenizer.save_pretrained(folder)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "unk_token": UNK,
        "additional_special_tokens": list(ROLES),
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
        "padding_side": "left",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
