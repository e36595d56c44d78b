"""Text that grows token by token: never half a character, and cut at stop strings."""

import codecs
from collections.abc import Sequence

from .tokenizer import BytePieces, Tokenizer

CONTEXT = 6
"""Tokens of the prompt that are decoded along, so that a leading space or a byte sequence comes out as it does in
the whole text.
"""
CUT_OFF = 3
"""A character that is cut off shows as at most so many U+FFFD: UTF-8 has at most four bytes."""
MAX_UNCLEAN = 16
"""Pushes in a row that end within a character, after which the bytes are taken to be broken."""


class Detokenizer:
    """Turns one completion's tokens into text as they arrive.

    New text is what decoding a window with the new tokens adds to decoding it without them; the window starts at the
    last clean break, so the cost of a token does not grow with the text.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, prompt_ids: Sequence[int], skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window = list(prompt_ids[-CONTEXT:])
        self._context = len(self._window)
        self._shown = len(self._decode(self._window))
        self._unclean = 0

    def _decode(self, token_ids: list[int]) -> str:
        return "" if self._tokenizer is None else self._tokenizer.decode(token_ids, self._skip)

    def push_one(self, token: int) -> str:
        """`push` for one token in the midst of a text."""
        return self.push((token,))

    def push(self, token_ids: Sequence[int], last: bool = False) -> str:
        """The text that `token_ids` add; `last` lets go of bytes that never became a character (as U+FFFD)."""
        if self._tokenizer is None:
            return ""
        self._window += token_ids
        text = self._decode(self._window)
        cut = len(text)
        if not last and self._unclean < MAX_UNCLEAN:
            while cut > max(self._shown, len(text) - CUT_OFF) and text[cut - 1] == "\ufffd":
                cut -= 1
        new = text[self._shown : cut]
        if cut < len(text):
            self._unclean += 1
            self._shown = max(self._shown, cut)
            return new
        del self._window[: self._context]
        self._context = len(self._window)
        self._shown = len(self._decode(self._window))
        self._unclean = 0
        return new


class ByteDetokenizer:
    """As `Detokenizer`, for a tokenizer whose text is the concatenation of its tokens' bytes."""

    def __init__(self, table: BytePieces, prompt_ids: Sequence[int], context: int) -> None:
        self._texts, self._pieces = table.texts, table.pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._clean = True
        self.push(prompt_ids[-context:])  # a prompt may end in the middle of a character

    def push_one(self, token: int) -> str:
        """`push` for one token in the midst of a text."""
        if self._clean:
            text = self._texts[token] if 0 <= token < len(self._texts) else ""
            if text is not None:
                return text
        return self.push((token,))

    def push(self, token_ids: Sequence[int], last: bool = False) -> str:
        """The text that `token_ids` add; `last` lets go of bytes that never became a character (as U+FFFD)."""
        count = len(self._pieces)
        text = self._decoder.decode(b"".join([self._pieces[token] for token in token_ids if 0 <= token < count]), last)
        self._clean = not self._decoder.getstate()[0]
        return text


def make_detokenizer(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool
) -> Detokenizer | ByteDetokenizer:
    """The quick one where the tokenizer allows it."""
    table = tokenizer.byte_table(skip_special_tokens) if hasattr(tokenizer, "byte_table") else None
    if table is not None:
        return ByteDetokenizer(table, prompt_ids, CONTEXT)
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
