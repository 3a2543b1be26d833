"""Small tokenizers of several kinds, built from a list of words."""

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers


def _merged(words: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Tokens and merges by which BPE writes each word as one token, left to right."""
    tokens: list[str] = []
    merges: list[tuple[str, str]] = []
    for word in words:
        for end in range(2, len(word) + 1):
            pair = (word[: end - 1], word[end - 1])
            if pair not in merges:
                merges.append(pair)
                tokens.append(word[:end])
    return tokens, merges


def byte_level(words: Sequence[str], special: Sequence[str] = ("<eos>",)) -> Any:
    """Byte-level BPE with a token for every byte and, by chains of merges, for each of the words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    byte_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    shown = ["".join(piece for piece, _ in byte_of.pre_tokenize_str(word)) for word in words]
    tokens, merges = _merged(shown)
    vocab = {token: i for i, token in enumerate(dict.fromkeys([*alphabet, *tokens]))}
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    return tokenizer


def sentencepiece(words: Sequence[str], special: Sequence[str] = ("<unk>", "<eos>")) -> Any:
    """BPE over characters with a mark for spaces and byte fallback, as SentencePiece models are converted."""
    tokens, merges = _merged(words)
    characters = sorted({one for word in words for one in word})
    names = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *characters, *tokens]
    vocab = {token: i for i, token in enumerate(dict.fromkeys(names))}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    return tokenizer


def pieces_of_text(characters: str, special: Sequence[str] = ("<pad>", "<eos>", "<unk>")) -> Any:
    """One token per given character; every other character becomes `<unk>`."""
    vocab = {token: i for i, token in enumerate([*special, *characters])}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    return tokenizer


def word_pieces(words: Sequence[str]) -> Any:
    """WordPiece: spaces between words belong to no token."""
    vocab = {token: i for i, token in enumerate(["[UNK]", *words])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer
