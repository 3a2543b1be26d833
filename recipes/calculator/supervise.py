"""The calculator's conversations as tokens to train on."""

from collections.abc import Sequence

from problems import Turn
from transformers import PreTrainedTokenizerFast

from understudy.policy.supervised import Encoded, pad_rows


def encode(tokenizer: PreTrainedTokenizerFast, conversations: Sequence[Sequence[Turn]]) -> Encoded:
    """Loss only on the assistant's correct turns and their <eos>."""
    eos, user, assistant, tool = (
        tokenizer.convert_tokens_to_ids(token) for token in ("<eos>", "<user>", "<assistant>", "<tool>")
    )
    marks = {"user": user, "assistant": assistant, "tool": tool}
    rows: list[tuple[list[int], list[bool]]] = []
    for turns in conversations:
        tokens, trained = [tokenizer.bos_token_id], [False]
        for turn in turns:
            ids = tokenizer.encode(turn.content, add_special_tokens=False)
            ids += [eos] if turn.role == "assistant" else []
            tokens += [marks[turn.role], *ids]
            trained += [False, *[turn.trained] * len(ids)]
        rows.append((tokens, trained))
    return pad_rows(rows, tokenizer.pad_token_id)
