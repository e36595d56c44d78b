"""Reads a directory's tokenizer as a `tokenizers.Tokenizer`, with the added tokens of its other files."""

import logging
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, processors

from ..api.errors import RequestError
from .sentencepiece_model import CONTROL, MODEL, USER_DEFINED, build_tokenizer, read_sentencepiece
from .special_tokens import Token, TokenFiles, tokenizer_class

_log = logging.getLogger("sidestream")


def read_tokenizer(directory: Path) -> Any:
    """Return the tokenizer as transformers' AutoTokenizer loads it, or None. Raises RequestError."""
    is_json = (directory / "tokenizer.json").is_file()
    if not is_json and not (directory / MODEL).is_file():
        return None
    files = TokenFiles.of(directory)
    tokenizer = read_json(directory / "tokenizer.json") if is_json else _from_sentencepiece(directory, files)
    there = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    tokenizer.add_tokens([AddedToken(**token) for token in files.added(there)])
    if not is_json:
        _add_ends(tokenizer, files)
    moved = [token["content"] for number, token in files.by_id.items() if _id(tokenizer, token) != number]
    if moved:
        _log.warning(
            "%s: %d added tokens have other ids than in added_tokens_decoder or added_tokens.json: %s",
            directory.name, len(moved), ", ".join(map(repr, moved[:5])),
        )  # fmt: skip
    return tokenizer


def read_json(path: Path) -> Any:
    """Return the tokenizer of a tokenizer.json. Raises RequestError."""
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises Exception itself
        raise RequestError(f"{path} is not a readable tokenizer ({error}); download or copy it again") from error


def _from_sentencepiece(directory: Path, files: TokenFiles) -> Any:
    """Return the tokenizer of a tokenizer.model, with its own special tokens."""
    model = read_sentencepiece(directory / MODEL)
    llama = tokenizer_class(directory, files.config) == "LlamaTokenizer"
    names = {number: token["content"] for number, token in files.by_id.items()}
    tokenizer = build_tokenizer(model, llama, files.config, names)
    if model.prefix and not llama:  # match them before a space is prepended to the text
        for token in files.by_id.values():
            token["normalized"] = False
    kinds = () if files.lists_extra else (CONTROL, USER_DEFINED) if llama else (CONTROL,)
    marks = [(text, kind) for text, _, kind in model.pieces if kind in kinds]
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=kind == CONTROL) for text, kind in marks])
    return tokenizer


def _id(tokenizer: Any, token: Token) -> Any:
    return tokenizer.token_to_id(token["content"])


def _add_ends(tokenizer: Any, files: TokenFiles) -> None:
    """Add BOS to texts unless `add_bos_token` is false, and EOS if `add_eos_token` is true."""
    bos, eos = files.named.get("bos_token"), files.named.get("eos_token")
    first = [bos] if bos and files.config.get("add_bos_token") is not False else []
    last = [eos] if eos and files.config.get("add_eos_token") is True else []
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*first, "$A", *last], special_tokens=[(text, tokenizer.token_to_id(text)) for text in {*first, *last}]
    )
