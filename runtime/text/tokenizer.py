"""Text to token ids and back:

`tokenizer.json` through `tokenizers`, Llama-2's `tokenizer.model` through sentencepiece, or nothing but ids.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from ..requests.errors import RequestError


class TooManyTokens(RequestError):
    """A text has so many `tokens`, more than were asked for."""

    def __init__(self, tokens: int) -> None:
        super().__init__(f"the text has {tokens} tokens")
        self.tokens = tokens


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer."""

    def encode(self, text: str, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        """The text's ids; `add_special_tokens`: with those that the model expects at the start.

        Raises TooManyTokens for more than `most`: a list of a million ids is tens of MiB, of which Python keeps some.
        """
        ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The ids' text; incomplete UTF-8 becomes U+FFFD."""
        ...

    def token_text(self, token_id: int) -> str:
        """One token alone, as text."""
        ...

    def token_id(self, token: str) -> int | None:
        """Return the id of a token, as the vocabulary spells it; None if it is not there."""
        ...


class BytePieces:
    """The bytes of every token of a byte-level tokenizer, so that a stream's text costs a look into a list instead of
    two decodings.

    `texts[id]`: the token's text, or None where it is not whole characters; `pieces[id]`: its bytes.

    Special tokens are empty.
    """

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces
        self.texts = [_whole(piece) for piece in pieces]


MOST_WORDS = 1000
"""Words whose tokens the tokenizers library remembers; by itself 10,000. Texts of ordinary words are encoded as fast,
and clients that invent words make a process keep a tenth of the memory: a word has up to 256 characters.
"""


class FastTokenizer:
    """A `tokenizer.json`."""

    def __init__(self, path: Path) -> None:
        import tokenizers

        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises Exception itself
            raise RequestError(
                f"{path} is no tokenizer that can be read ({error}); download or copy it again"
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        remember = getattr(self._tokenizer.model, "_resize_cache", None)  # models without a memory have none
        if remember is not None:
            remember(MOST_WORDS)
        self._tables: dict[bool, BytePieces | None] = {}
        self._texts: dict[int, str] = {}

    def encode(self, text: str, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        """See `Tokenizer`."""
        # unlike `encode`, it lets other threads run meanwhile; unlike `encode_batch`, it keeps no places in the text
        (found,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        if most is not None and len(found) > most:
            raise TooManyTokens(len(found))
        return list(found.ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """See `Tokenizer`."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token_text(self, token_id: int) -> str:
        """See `Tokenizer`."""
        text = self._texts.get(token_id)
        if text is None:  # log-probabilities ask for the same thousands again and again
            text = self._texts[token_id] = self.decode([token_id], skip_special_tokens=False)
        return text

    def token_id(self, token: str) -> int | None:
        """See `Tokenizer`."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    @property
    def size(self) -> int:
        """One more than the highest id."""
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)

    def definition(self) -> str:
        """The tokenizer as the text of a tokenizer.json."""
        return str(self._tokenizer.to_str())

    def byte_table(self, skip_special_tokens: bool) -> BytePieces | None:
        """Every token's bytes, if the tokenizer is a byte-level one."""
        if skip_special_tokens not in self._tables:
            self._tables[skip_special_tokens] = byte_pieces(self._tokenizer, skip_special_tokens)
        return self._tables[skip_special_tokens]


class SentencePieceTokenizer:
    """Llama-2's `tokenizer.model`."""

    def __init__(self, path: Path) -> None:
        import sentencepiece

        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise RequestError(
                f"{path.name} is not a sentencepiece model (Llama 3's tokenizer.model is not one); put the model's "
                "tokenizer.json next to it"
            ) from error

    def encode(self, text: str, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        """See `Tokenizer`."""
        processor = self._processor
        ids = list(processor.encode(text))
        if add_special_tokens and processor.bos_id() >= 0:
            ids.insert(0, processor.bos_id())
        if most is not None and len(ids) > most:
            raise TooManyTokens(len(ids))
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """See `Tokenizer`."""
        processor = self._processor
        known = [token for token in token_ids if 0 <= token < processor.get_piece_size()]
        if skip_special_tokens:
            return str(processor.decode([token for token in known if not processor.is_control(token)]))
        parts: list[str] = []
        plain: list[int] = []
        for token in known:
            if processor.is_control(token):
                parts += (
                    [processor.decode(plain), processor.id_to_piece(token)] if plain else [processor.id_to_piece(token)]
                )
                plain = []
            else:
                plain.append(token)
        return "".join(parts) + (processor.decode(plain) if plain else "")

    def token_text(self, token_id: int) -> str:
        """See `Tokenizer`."""
        if not 0 <= token_id < self._processor.get_piece_size():
            return ""
        return str(self._processor.id_to_piece(token_id)).replace("\u2581", " ")

    def token_id(self, token: str) -> int | None:
        """See `Tokenizer`."""
        found = int(self._processor.piece_to_id(token))
        return found if self._processor.id_to_piece(found) == token else None

    @property
    def bos_id(self) -> int:
        """The id that begins a text, or -1."""
        return int(self._processor.bos_id())

    @property
    def eos_id(self) -> int:
        """The id that ends a text, or -1."""
        return int(self._processor.eos_id())

    def encode_inside(self, text: str) -> list[int]:
        """The ids of a piece of text in the midst of another: no token for the start, no space put in front."""
        mark = "\u2402"  # what stands before the text takes the space that a text's first word gets
        processor = self._processor
        return list(processor.encode(mark + text))[len(processor.encode(mark)) :]

    def pieces(self) -> tuple[list[bytes], list[int]]:
        """(the bytes of every token, the special ones)."""
        processor = self._processor
        made: list[bytes] = []
        special: list[int] = []
        for token in range(processor.get_piece_size()):
            piece = processor.id_to_piece(token)
            if processor.is_control(token) or processor.is_unknown(token):
                special.append(token)
                made.append(piece.encode())
            elif processor.is_byte(token):
                made.append(bytes([int(piece[3:5], 16)]))
            else:
                made.append(piece.replace("\u2581", " ").encode())
        return made, special


def load_tokenizer(directory: Path | None) -> Tokenizer | None:
    """The tokenizer in a model's directory; None if there is none (prompts are token ids then, and texts stay '')."""
    if directory is None:
        return None
    if (directory / "tokenizer.json").is_file():
        return FastTokenizer(directory / "tokenizer.json")
    if (directory / "tokenizer.model").is_file():
        return SentencePieceTokenizer(directory / "tokenizer.model")
    return None


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
