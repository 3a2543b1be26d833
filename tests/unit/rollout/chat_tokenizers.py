"""Small real tokenizers with the chat formats of well-known model families, built when a test asks for one.

A byte-level BPE tokenizer is trained on a few lines and gets the family's special tokens and chat template. The
templates are written here after the formats that those families document.
"""

from copy import copy
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    'The answer is 42. <tool_call> {"name": "calculator", "arguments": {"expression": "12 * (3 + 4)"}} </tool_call>',
    "user assistant system tool think result error python function parameters description string number",
    "Let me think about it step by step. First add the numbers, then sort the letters.\n\n",
] * 4

CHATML = """\
{%- if tools -%}
<|im_start|>system\n{{ messages[0]['content'] + '\\n\\n' if messages[0]['role'] == 'system' else '' }}# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor -%}
<|im_end|>\n
{%- elif messages[0]['role'] == 'system' -%}
<|im_start|>system\n{{ messages[0]['content'] }}<|im_end|>\n
{%- endif -%}
{%- set state = namespace(last_query=-1) -%}
{%- for message in messages -%}{%- if message['role'] == 'user' -%}{%- set state.last_query = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}
{{ '<|im_start|>user\\n' + message['content'] + '<|im_end|>\\n' }}
{%- elif message['role'] == 'assistant' -%}
{%- set content = message['content'] or '' -%}
{%- set thought = '' -%}
{%- if '</think>' in content -%}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{%- if loop.index0 > state.last_query -%}
{{ '<|im_start|>assistant\\n<think>\\n' + thought + '\\n</think>\\n\\n' + content }}
{%- else -%}
{{ '<|im_start|>assistant\\n' + content }}
{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- elif message['role'] == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1]['role'] != 'tool' -%}{{ '<|im_start|>user' }}{%- endif -%}
{{ '\\n<tool_response>\\n' + message['content'] + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1]['role'] != 'tool' -%}{{ '<|im_end|>\\n' }}{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""

LLAMA3 = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- set role = 'ipython' if message['role'] == 'tool' else message['role'] -%}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' -}}
{%- if role == 'ipython' -%}{{- {'output': message['content']} | tojson -}}
{%- else -%}{{- message['content'] | trim -}}{%- endif -%}
{{- '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}
"""

MISTRAL = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}{{- '[INST] ' + message['content'] + ' [/INST]' -}}
{%- elif message['role'] == 'assistant' -%}{{- ' ' + message['content'] + eos_token -}}
{%- elif message['role'] == 'tool' -%}{{- '[TOOL_RESULTS] {"content": ' + (message['content'] | tojson) + '} [/TOOL_RESULTS]' -}}
{%- endif -%}
{%- endfor -%}
"""

GEMMA = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] not in ('user', 'assistant') -%}{{- raise_exception('the roles are user and assistant') -}}{%- endif -%}
{%- set role = 'model' if message['role'] == 'assistant' else 'user' -%}
{{- '<start_of_turn>' + role + '\\n' + (message['content'] | trim) + '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}
"""

PLAIN = """\
{%- for message in messages -%}
{{- message['role'] + ': ' + message['content'] + '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'assistant: ' -}}{%- endif -%}
"""

FAMILIES: dict[str, dict[str, Any]] = {
    "chatml": {
        "bos": None,
        "eos": "<|im_end|>",
        "special": ["<|im_start|>", "<|endoftext|>"],
        "template": CHATML,
    },
    "llama3": {
        "bos": "<|begin_of_text|>",
        "eos": "<|eot_id|>",
        "special": ["<|start_header_id|>", "<|end_header_id|>"],
        "template": LLAMA3,
    },
    "mistral": {
        "bos": "<s>",
        "eos": "</s>",
        "special": ["[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
        "template": MISTRAL,
    },
    "gemma": {"bos": "<bos>", "eos": "<end_of_turn>", "special": ["<start_of_turn>"], "template": GEMMA},
    "plain": {"bos": None, "eos": "</s>", "special": [], "template": PLAIN},
}
UNNAMED_END: dict[str, dict[str, Any]] = {
    "gemma3": {
        "bos": "<bos>",
        "eos": "<eos>",
        "special": ["<start_of_turn>", "<end_of_turn>"],
        "template": GEMMA,
    },
    "chatml-base": {
        "bos": None,
        "eos": "<|endoftext|>",
        "special": ["<|im_start|>", "<|im_end|>"],
        "template": CHATML,
    },
}
"""Families whose end-of-turn token is not named in the tokenizer's config; only the generation config lists it."""
ENDS = {"gemma3": "<end_of_turn>", "chatml-base": "<|im_end|>"}


def chat_tokenizer(family: str) -> Any:
    """A copy for each caller, so that a test may replace its chat template."""
    return copy(_trained(family))


@cache
def _trained(family: str) -> Any:
    kind = (FAMILIES | UNNAMED_END)[family]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    names = [name for name in (kind["bos"], kind["eos"], *kind["special"]) if name]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=kind["bos"],
        eos_token=kind["eos"],
        pad_token=kind["eos"],
        chat_template=kind["template"],
        clean_up_tokenization_spaces=False,
    )
