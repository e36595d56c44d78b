"""Streams tokens as text without incomplete characters, and finds stop strings."""

import codecs
from collections.abc import Iterator, Sequence

from .token_bytes import TokenBytes
from .tokenizer import Tokenizer

CONTEXT = 6  # prompt tokens that a tokenizer without a byte table decodes as context, if they have text
MAX_HELD = 16  # most tokens that such a tokenizer holds back as an incomplete character
LONGEST_CUT = 3  # most bytes of an incomplete UTF-8 character


class Detokenizer:
    """Decodes one completion's tokens as they arrive, each after the previous ones.

    For tokenizers without a byte table, such as WordPiece.
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
        """Return the text of one token that is not at the start of a text."""
        return self.push((token,))

    def push(self, token_ids: Sequence[int], last: bool = False) -> str:
        """Return the text that `token_ids` add; `last` releases text that was held back."""
        self._window += token_ids
        text = self._decode(self._window)
        if text.endswith("\ufffd") and not last and len(self._window) < self._context + MAX_HELD:
            return ""
        new = text[len(self._decode(self._window[: self._context])) :]
        if new:  # tokens without text are not useful as context
            del self._window[: self._context]
            self._context = len(self._window)
        return new

    def broken_before(self, token: int) -> int:
        return 0

    @property
    def at_start(self) -> bool:
        return False


class ByteDetokenizer:
    """A detokenizer for a tokenizer with a byte table. It gives the same text as decoding all tokens at once.

    A character that the prompt starts belongs to the answer if the answer completes it, and otherwise to the prompt.
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
        self._prompt_bytes: bytes = self._decoder.getstate()[0]  # the prompt's part of an incomplete character
        self._since = self._prompt_bytes  # the same with the bytes that the answer has added
        self._clean = not self._prompt_bytes and not self._at_start

    @property
    def at_start(self) -> bool:
        """Whether the next token is the first of the whole text, where a decoder may drop a space."""
        return self._at_start

    def push_one(self, token: int) -> str:
        """Return the text of one token that is not at the start of a text."""
        if self._clean:
            text = self._texts[token] if 0 <= token < len(self._texts) else ""
            if text is not None:
                return text
        return self.push((token,))

    def push(self, token_ids: Sequence[int], last: bool = False) -> str:
        """Return the text that `token_ids` add; `last` releases bytes of incomplete characters (as U+FFFD)."""
        added = self._from_start(token_ids) if self._at_start else map(self._piece, token_ids)
        new = b"".join(added)
        text = self._decoder.decode(new, last)
        if self._prompt_bytes:
            text = self._without_prompt(new, text)
        self._clean = not self._decoder.getstate()[0] and not self._at_start
        return text

    def broken_before(self, token: int) -> int:
        """Return the number of U+FFFD before the text of `token`, for a character that it does not complete."""
        pending, piece = self._decoder.getstate()[0], self._piece(token)
        if not pending or not piece or 0x80 <= piece[0] < 0xC0:
            return 0
        return len(pending) - len(self._prompt_bytes) if self._table.each_byte else int(not self._prompt_bytes)

    def _piece(self, token: int) -> bytes:
        return self._pieces[token] if 0 <= token < len(self._pieces) else b""

    def _from_start(self, token_ids: Sequence[int]) -> Iterator[bytes]:
        for token in token_ids:
            piece = self._piece(token)
            if self._at_start:
                piece, self._at_start = self._table.begin(piece)
            yield piece

    def _tail(self, prompt_ids: Sequence[int]) -> bytes:
        """Return the prompt's last bytes that may belong to an incomplete character."""
        tail = b""
        for token in reversed(prompt_ids):
            if len(tail) >= LONGEST_CUT:
                break
            tail = self._piece(token) + tail
        return tail[-LONGEST_CUT:]

    def _without_prompt(self, new: bytes, text: str) -> str:
        """Remove the U+FFFD of a character that the prompt starts and the answer does not complete."""
        self._since += new
        if not text:
            return ""
        start, self._prompt_bytes = self._prompt_bytes, b""
        width = 2 if start[0] < 0xE0 else 3 if start[0] < 0xF0 else 4
        try:
            self._since[:width].decode()
        except UnicodeDecodeError:
            return text[len(start) if self._table.each_byte else 1 :]
        return text


def make_detokenizer(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool
) -> Detokenizer | ByteDetokenizer:
    """Return the byte detokenizer if the tokenizer supports it, else the slower one."""
    table = tokenizer.byte_table
    if table is not None:
        return ByteDetokenizer(table, prompt_ids, skip_special_tokens)
    return Detokenizer(tokenizer, prompt_ids, skip_special_tokens)


class StopStrings:
    """Finds stop strings in a growing text.

    held   characters at the end that may belong to a stop string, and must not be sent yet
    """

    def __init__(self, strings: Sequence[str], keep: bool) -> None:
        self._strings = tuple(strings)
        self._keep = keep
        self.held = 0 if keep or not strings else max(map(len, strings)) - 1

    def find(self, text: str, new: int) -> tuple[str, int] | None:
        """Return (stop string, end of the text) of the first one completed in the last `new` characters, or None."""
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
