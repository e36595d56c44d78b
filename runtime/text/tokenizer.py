"""Text to token ids and back, with the `tokenizers` library."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from ...graphs.files.untrusted_files import LFS_POINTER, is_lfs_pointer
from ..api.errors import RequestError
from .token_bytes import TokenBytes, fast_token_bytes


class TooManyTokens(RequestError):
    """A text has `tokens` tokens, more than the limit."""

    def __init__(self, tokens: int) -> None:
        super().__init__(f"the text has {tokens} tokens")
        self.tokens = tokens


class Tokenizer(Protocol):
    """Interface of a tokenizer for the engine."""

    def encode(self, text: str, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        """Return the text's ids; `add_special_tokens` adds those that the model expects at the start.

        Raises TooManyTokens for more than `most` tokens, because a list of a million ids takes tens of MiB.
        """

    def encode_with_offsets(self, text: str, add_special_tokens: bool, most: int) -> tuple[list[int], list[int]]:
        """Return the text's ids as `encode`, and the offsets of the characters of each token: start, end, start, ...

        They are indices of `text`; 0, 0 for added special tokens. Tokens of a part of a character have its offsets.
        """

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the ids' text; incomplete UTF-8 becomes U+FFFD."""

    @property
    def byte_table(self) -> TokenBytes | None:
        """Bytes of every token, if texts are concatenations of them; computed at first use."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return what a token adds to a text, as UTF-8; b"" for an invalid id."""

    def token_id(self, token: str) -> int | None:
        """Return the id of a token, as spelled in the vocabulary; None if it is not there."""

    def spelling(self, token_id: int) -> str:
        """Return a token as spelled in the vocabulary; "" for an invalid id."""


# Words in the library's cache, 10,000 by default. Ordinary texts are encoded as fast, and clients that send random
# words (of up to 256 characters) use a tenth of the memory.
MAX_CACHED_WORDS = 1000


class FastTokenizer:
    """A tokenizer of the tokenizers library, or the path of a `tokenizer.json`."""

    def __init__(self, source: Any) -> None:
        from .tokenizer_files import read_json

        self._tokenizer = read_json(source) if isinstance(source, Path) else source
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        limit_cache = getattr(self._tokenizer.model, "_resize_cache", None)  # some models have no cache
        if limit_cache is not None:
            limit_cache(MAX_CACHED_WORDS)
        self._bytes: dict[int, bytes] = {}

    def encode(self, text: str, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        # unlike `encode`, it releases the GIL; unlike `encode_batch`, it stores no offsets
        (found,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        if most is not None and len(found) > most:
            raise TooManyTokens(len(found))
        return list(found.ids)

    def encode_with_offsets(self, text: str, add_special_tokens: bool, most: int) -> tuple[list[int], list[int]]:
        (found,) = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        if len(found) > most:
            raise TooManyTokens(len(found))
        return list(found.ids), [offset for pair in found.offsets for offset in pair]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token_id: int) -> bytes:
        table = self.byte_table
        if table is not None:
            return table.pieces[token_id] if 0 <= token_id < len(table.pieces) else b""
        piece = self._bytes.get(token_id)
        if piece is None:  # log-probabilities repeat the same thousands of tokens
            before = self._word
            text = self.decode([*before, token_id], skip_special_tokens=False)
            piece = text[len(self.decode(before, skip_special_tokens=False)) :].encode()
            self._bytes[token_id] = piece
        return piece

    @cached_property
    def _word(self) -> list[int]:
        """Return a token that may precede another one in a text; [] if there is none."""
        return next(([token] for token in range(self.size) if self.decode([token]).isalpha()), [])

    def token_id(self, token: str) -> int | None:
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def spelling(self, token_id: int) -> str:
        return self._tokenizer.id_to_token(token_id) or ""

    @property
    def size(self) -> int:
        """The highest id plus one."""
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)

    def definition(self) -> str:
        """Return the tokenizer as the text of a tokenizer.json."""
        return str(self._tokenizer.to_str())

    @cached_property
    def byte_table(self) -> TokenBytes | None:
        return fast_token_bytes(self._tokenizer)


def load_tokenizer(directory: Path | None) -> Tokenizer | None:
    """Return the tokenizer of a model's directory, or None without one (prompts are then token ids, and texts '')."""
    if directory is None:
        return None
    for name in ("tokenizer.json", "tokenizer.model"):
        if is_lfs_pointer(directory / name):
            raise RequestError(f"{directory / name} {LFS_POINTER}")
    from .tokenizer_files import read_tokenizer

    found = read_tokenizer(directory)
    return None if found is None else FastTokenizer(found)
