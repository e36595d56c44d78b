"""The bytes of every token of a vocabulary, from which streams and log-probabilities make their text."""

import codecs
import json
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

Start = Literal["keep", "once", "first"]
"""What a decoder does with spaces at the beginning of a text: nothing, drop one, or drop all of the first token."""
EACH_BYTE = "sidestream.each_byte"
"""Name of the error handler that puts one U+FFFD for each byte that is part of no character."""
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class Contributions:
    """What each token adds to a text. `pieces[id]`: its bytes; `texts[id]`: the same as a string, None where the bytes
    are not whole characters.
    """

    pieces: list[bytes]
    texts: list[str | None]


@dataclass(frozen=True)
class TokenBytes:
    """The bytes of every token, for a tokenizer whose text is the concatenation of its tokens' bytes.

    pieces      the bytes of each token; those of special tokens are their names
    special     ids that `skip_special_tokens` leaves out
    each_byte   each byte that is part of no character becomes a U+FFFD; else a sequence that is cut off becomes one
    start       see `Start`
    """

    pieces: list[bytes]
    special: frozenset[int] = frozenset()
    each_byte: bool = False
    start: Start = "keep"

    @property
    def errors(self) -> str:
        """How bytes that are part of no character are decoded, as `bytes.decode` names it."""
        return EACH_BYTE if self.each_byte else "replace"

    @cached_property
    def shown(self) -> Contributions:
        """Contributions of all tokens."""
        return Contributions(self.pieces, [_whole(piece) for piece in self.pieces])

    @cached_property
    def skipped(self) -> Contributions:
        """Contributions where special tokens are left out."""
        pieces, texts = self.pieces[:], self.shown.texts[:]
        for token in self.special:
            if 0 <= token < len(pieces):
                pieces[token], texts[token] = b"", ""
        return Contributions(pieces, texts)

    def contributions(self, skip_special_tokens: bool) -> Contributions:
        """What each token adds to a text."""
        return self.skipped if skip_special_tokens else self.shown

    def begin(self, piece: bytes) -> tuple[bytes, bool]:
        """What the contribution of a token adds at the beginning of a text, and whether the token after it is still at
        the beginning.
        """
        if self.start == "first":
            return piece.replace(b" ", b""), not piece
        return piece.removeprefix(b" ") if self.start == "once" else piece, not piece and self.start != "keep"


def as_text(piece: bytes) -> str:
    """The bytes of one token as text; a part of a character becomes U+FFFD."""
    return piece.decode("utf-8", "replace")


def fast_token_bytes(tokenizer: Any) -> TokenBytes | None:
    """The table of a `tokenizers.Tokenizer`; None if its decoder does more than to put tokens next to one another."""
    rules = None if tokenizer.decoder is None else _rules(json.loads(tokenizer.decoder.__getstate__()))
    if rules is None:
        return None
    added = tokenizer.get_added_tokens_decoder()
    names = {number: name for name, number in tokenizer.get_vocab(with_added_tokens=False).items()}
    names |= {number: token.content for number, token in added.items()}
    pieces = [b""] * (1 + max(names, default=-1))
    byte_of = {letter: byte for byte, letter in enumerate(letters())}
    for number, name in names.items():
        if rules.byte_level:
            known = all(letter in byte_of for letter in name)
            pieces[number] = bytes(byte_of[letter] for letter in name) if known else name.encode()
            continue
        for old, new in rules.replacements:
            name = name.replace(old, new)
        byte = BYTE_TOKEN.fullmatch(name) if rules.byte_fallback else None
        pieces[number] = name.encode() if byte is None else bytes([int(byte[1], 16)])
    special = frozenset(number for number, token in added.items() if token.special)
    return TokenBytes(pieces, special, rules.byte_fallback, rules.start)


def letters() -> list[str]:
    """The letter that stands for each byte in a byte-level vocabulary (GPT-2's): printable Latin-1 for itself, the
    others from U+0100 on.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


@dataclass
class _Rules:
    """What the decoders of a tokenizer.json do with a token's name."""

    replacements: list[tuple[str, str]]
    byte_level: bool = False
    byte_fallback: bool = False
    fused: bool = False
    start: Start = "keep"


def _rules(decoder: dict[str, Any]) -> _Rules | None:
    """The rules of a decoder or a sequence of decoders; None if it does anything else."""
    rules = _Rules([])
    for each in decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]:
        kind = each["type"]
        if kind == "ByteLevel" and rules == _Rules([]):
            rules.byte_level = True
        elif kind == "Replace" and "String" in each["pattern"] and not rules.byte_level:
            rules.replacements.append((each["pattern"]["String"], each["content"]))
        elif kind == "ByteFallback" and not rules.byte_level:
            rules.byte_fallback = True
        elif kind == "Fuse":
            rules.fused = True
        elif kind == "Strip" and rules.fused and each["content"] == " " and each["stop"] == 0 and each["start"] == 1:
            rules.start = "once"
        elif kind == "Metaspace" and not rules.byte_level and not rules.fused:
            rules.replacements.append((each["replacement"], " "))
            rules.start = "keep" if each.get("prepend_scheme") == "never" else "first"
        else:
            return None
    return rules


def _mark_each_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(EACH_BYTE, _mark_each_byte)


def _whole(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None
