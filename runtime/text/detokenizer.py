"""Text that grows token by token: never half a character, and cut at stop strings."""

import codecs
from collections.abc import Iterator, Sequence

from .token_bytes import TokenBytes
from .tokenizer import Tokenizer

CONTEXT = 6
"""Tokens of the prompt that a tokenizer without a table of bytes decodes along, if they have text."""
MAX_HELD = 16
"""Tokens that such a tokenizer may hold back as an incomplete character."""
LONGEST_CUT = 3
"""Bytes of an incomplete character: UTF-8 has at most four."""


class Detokenizer:
    """Turns one completion's tokens into text as they arrive, by decoding each one after those before it. For
    tokenizers that have no table of bytes, such as WordPiece.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        count = CONTEXT
        while count < len(prompt_ids) and not self._decode(list(prompt_ids[-count:])):
            count *= 2
        self._window = list(prompt_ids[-count:])
        self._context = len(self._window)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, self._skip)

    def push_one(self, token: int) -> str:
        """`push` for one token in the midst of a text."""
        return self.push((token,))

    def push(self, token_ids: Sequence[int], last: bool = False) -> str:
        """The text that `token_ids` add; `last` releases what is held back."""
        self._window += token_ids
        text = self._decode(self._window)
        if text.endswith("\ufffd") and not last and len(self._window) < self._context + MAX_HELD:
            return ""
        new = text[len(self._decode(self._window[: self._context])) :]
        if new:  # tokens without text are no context
            del self._window[: self._context]
            self._context = len(self._window)
        return new

    def broken_before(self, token: int) -> int:
        """See `ByteDetokenizer`."""
        return 0

    @property
    def at_start(self) -> bool:
        """See `ByteDetokenizer`."""
        return False


class ByteDetokenizer:
    """As `Detokenizer`, for a tokenizer whose text is the concatenation of its tokens' bytes. Tokens that arrive one by
    one give the same text as all together.

    A character that the prompt begins belongs to the answer that completes it; one that the answer does not complete
    belongs to the prompt.
    """

    def __init__(self, table: TokenBytes, prompt_ids: Sequence[int], skip_special_tokens: bool = True) -> None:
        self._table = table
        shown = table.contributions(skip_special_tokens)
        self._texts, self._pieces = shown.texts, shown.pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")(table.errors)
        self._at_start = table.start != "keep"
        for _ in self._from_start(prompt_ids):
            if not self._at_start:
                break
        self._decoder.decode(self._tail(prompt_ids))
        self._begun: bytes = self._decoder.getstate()[0]  # the prompt's part of an incomplete character
        self._since = self._begun  # the same with what the answer has of it
        self._clean = not self._begun and not self._at_start

    @property
    def at_start(self) -> bool:
        """Whether the next token is the first of the whole text, where a decoder may drop a space."""
        return self._at_start

    def push_one(self, token: int) -> str:
        """`push` for one token in the midst of a text."""
        if self._clean:
            text = self._texts[token] if 0 <= token < len(self._texts) else ""
            if text is not None:
                return text
        return self.push((token,))

    def push(self, token_ids: Sequence[int], last: bool = False) -> str:
        """The text that `token_ids` add; `last` releases bytes that never became a character (as U+FFFD)."""
        added = self._from_start(token_ids) if self._at_start else map(self._piece, token_ids)
        new = b"".join(added)
        text = self._decoder.decode(new, last)
        if self._begun:
            text = self._without_prompt(new, text)
        self._clean = not self._decoder.getstate()[0] and not self._at_start
        return text

    def broken_before(self, token: int) -> int:
        """How many U+FFFD come out before the text of a next token, for an incomplete character that it does not go on
        with.
        """
        pending, piece = self._decoder.getstate()[0], self._piece(token)
        if not pending or not piece or 0x80 <= piece[0] < 0xC0:
            return 0
        return len(pending) - len(self._begun) if self._table.each_byte else int(not self._begun)

    def _piece(self, token: int) -> bytes:
        return self._pieces[token] if 0 <= token < len(self._pieces) else b""

    def _from_start(self, token_ids: Sequence[int]) -> Iterator[bytes]:
        for token in token_ids:
            piece = self._piece(token)
            if self._at_start:
                piece, self._at_start = self._table.begin(piece)
            yield piece

    def _tail(self, prompt_ids: Sequence[int]) -> bytes:
        """The last bytes of the prompt, as many as an incomplete character may have."""
        tail = b""
        for token in reversed(prompt_ids):
            if len(tail) >= LONGEST_CUT:
                break
            tail = self._piece(token) + tail
        return tail[-LONGEST_CUT:]

    def _without_prompt(self, new: bytes, text: str) -> str:
        """Leave out the U+FFFD of a character that the prompt begins and the answer does not complete."""
        self._since += new
        if not text:
            return ""
        begun, self._begun = self._begun, b""
        width = 2 if begun[0] < 0xE0 else 3 if begun[0] < 0xF0 else 4
        try:
            self._since[:width].decode()
        except UnicodeDecodeError:
            return text[len(begun) if self._table.each_byte else 1 :]
        return text


def make_detokenizer(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool
) -> Detokenizer | ByteDetokenizer:
    """The quick one where the tokenizer allows it."""
    table = tokenizer.byte_table
    if table is not None:
        return ByteDetokenizer(table, prompt_ids, skip_special_tokens)
    return Detokenizer(tokenizer, prompt_ids, skip_special_tokens)


class StopStrings:
    """Looks for stop strings in a growing text."""

    def __init__(self, strings: Sequence[str], keep: bool) -> None:
        self._strings = tuple(strings)
        self._keep = keep
        self.held = 0 if keep or not strings else max(map(len, strings)) - 1
        """Characters at the end that may turn out to belong to a stop string: not to be shown yet."""

    def find(self, text: str, new: int) -> tuple[str, int] | None:
        """(stop string, where the text ends) of the stop string that is complete first within the last `new`
        characters, else None.
        """
        best: tuple[int, int, str] | None = None
        for string in self._strings:
            start = text.find(string, max(0, len(text) - new - len(string) + 1))
            if start >= 0:
                candidate = (start + len(string), start, string)
                best = candidate if best is None else min(best, candidate)
        if best is None:
            return None
        end, start, string = best
        return string, end if self._keep else start
