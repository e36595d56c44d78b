"""Tokenizers of the kinds that families have, with a token for each byte and no merges: no downloads."""

from collections.abc import Sequence

import tokenizers
from sidestream.runtime.text.token_bytes import letters
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors


def byte_level(special: Sequence[str | AddedToken], bos: str | None = None) -> tokenizers.Tokenizer:
    """As GPT-2's, Llama 3's and Qwen's; `bos`: what it puts before a text."""
    tokenizer = tokenizers.Tokenizer(models.BPE({letter: place for place, letter in enumerate(letters())}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _with_special_tokens(tokenizer, special, bos)


def metaspace(special: Sequence[str | AddedToken], bos: str | None = None) -> tokenizers.Tokenizer:
    """As Llama 2's and Mistral's."""
    tokenizer = _pieces()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return _with_special_tokens(tokenizer, special, bos)


def prepended(special: Sequence[str | AddedToken], bos: str | None = None) -> tokenizers.Tokenizer:
    """As Phi-3's: the space before the first word, and before one after each special token, is the normalizer's."""
    tokenizer = _pieces()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    return _with_special_tokens(tokenizer, special, bos)


def _pieces() -> tokenizers.Tokenizer:
    pieces = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"\u2581": 256, "<unk>": 257}
    return tokenizers.Tokenizer(models.BPE(pieces, [], unk_token="<unk>", byte_fallback=True))


def _with_special_tokens(
    tokenizer: tokenizers.Tokenizer, special: Sequence[str | AddedToken], bos: str | None
) -> tokenizers.Tokenizer:
    tokenizer.add_special_tokens(list(special))
    if bos is not None:
        single = f"{bos} $A"
        places = [(bos, tokenizer.token_to_id(bos))]
        tokenizer.post_processor = processors.TemplateProcessing(single, special_tokens=places)
    return tokenizer
