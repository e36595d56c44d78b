"""Bytes of every token of a vocabulary, for streams and log-probabilities."""

import codecs
import json
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

# what a decoder does with spaces at the start of a text: keep them, drop one, or drop all of the first token
Start = Literal["keep", "once", "first"]
EACH_BYTE = "sidestream.each_byte"  # error handler: one U+FFFD per invalid byte
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class Contributions:
    """What each token adds to a text: `pieces[id]` as bytes, `texts[id]` as text (None: incomplete characters)."""

    pieces: list[bytes]
    texts: list[str | None]


@dataclass(frozen=True)
class TokenBytes:
    """Bytes of every token; a text is their concatenation.

    pieces      bytes of each token; special tokens have their names
    special     ids that `skip_special_tokens` omits
    each_byte   each invalid byte becomes a U+FFFD; else each truncated sequence becomes one
    start       see `Start`
    """

    pieces: list[bytes]
    special: frozenset[int] = frozenset()
    each_byte: bool = False
    start: Start = "keep"

    @property
    def errors(self) -> str:
        """Error handler of `bytes.decode` for invalid bytes."""
        return EACH_BYTE if self.each_byte else "replace"

    @cached_property
    def shown(self) -> Contributions:
        """Contributions of all tokens."""
        return Contributions(self.pieces, [_whole(piece) for piece in self.pieces])

    @cached_property
    def skipped(self) -> Contributions:
        """Contributions without special tokens."""
        pieces, texts = self.pieces[:], self.shown.texts[:]
        for token in self.special:
            if 0 <= token < len(pieces):
                pieces[token], texts[token] = b"", ""
        return Contributions(pieces, texts)

    def contributions(self, skip_special_tokens: bool) -> Contributions:
        """Return each token's contribution to a text."""
        return self.skipped if skip_special_tokens else self.shown

    def begin(self, piece: bytes) -> tuple[bytes, bool]:
        """Return what a piece adds at the start of a text, and whether the next token is still at the start."""
        if self.start == "first":
            return piece.replace(b" ", b""), not piece
        return piece.removeprefix(b" ") if self.start == "once" else piece, not piece and self.start != "keep"


def as_text(piece: bytes) -> str:
    """Return the bytes of one token as text; an incomplete character becomes U+FFFD."""
    return piece.decode("utf-8", "replace")


def fast_token_bytes(tokenizer: Any) -> TokenBytes | None:
    """Return the table of a `tokenizers.Tokenizer`, or None if its decoder does more than concatenate tokens."""
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
    """Return the letter of each byte in a byte-level vocabulary (GPT-2): printable Latin-1, others from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


@dataclass
class _Rules:
    """How the decoders of a tokenizer.json treat a token's name."""

    replacements: list[tuple[str, str]]
    byte_level: bool = False
    byte_fallback: bool = False
    fused: bool = False
    start: Start = "keep"


def _rules(decoder: dict[str, Any]) -> _Rules | None:
    """Return the rules of a decoder or a sequence of decoders; None for any other decoder."""
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
