"""The bytes of every token of a byte-level tokenizer, so that a stream's text costs a look into a list instead of
two decodings.
"""

import codecs
import json
from collections.abc import Sequence
from typing import Any


class BytePieces:
    """`texts[id]`: the token's text, or None where it is not whole characters; `pieces[id]`: its bytes.

    Special tokens are empty.
    """

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces
        self.texts = [_whole(piece) for piece in pieces]


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


def byte_pieces(tokenizer: Any, skip_special_tokens: bool) -> BytePieces | None:
    """The table of a `tokenizers.Tokenizer`; None if its decoder is not the byte-level one alone."""
    if tokenizer.decoder is None or json.loads(tokenizer.decoder.__getstate__()).get("type") != "ByteLevel":
        return None
    special = (
        {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        if skip_special_tokens
        else set()
    )
    byte_of = {letter: byte for byte, letter in enumerate(letters())}
    names = tokenizer.get_vocab(with_added_tokens=True)
    pieces = [b""] * (1 + max(names.values(), default=-1))
    for name, number in names.items():
        if number not in special:
            pieces[number] = (
                bytes(byte_of[letter] for letter in name)
                if all(letter in byte_of for letter in name)
                else name.encode()
            )
    return BytePieces(pieces)


def letters() -> list[str]:
    """The letter that stands for each byte in a byte-level vocabulary (GPT-2's): printable Latin-1 for itself, the
    others from U+0100 on.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def _whole(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None
