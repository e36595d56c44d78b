"""Text to token ids and back:

`tokenizer.json` through `tokenizers`, Llama-2's `tokenizer.model` through sentencepiece, or nothing but ids.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Protocol

from ...graphs.regular_file import LFS_POINTER, is_lfs_pointer
from ..requests.errors import RequestError
from .token_bytes import TokenBytes, fast_token_bytes


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

    @property
    def byte_table(self) -> TokenBytes | None:
        """Every token's bytes, if the text of ids is the concatenation of their bytes; made at the first use."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to a text, as UTF-8; b"" for an id that is no token."""
        ...

    def token_id(self, token: str) -> int | None:
        """Return the id of a token, as the vocabulary spells it; None if it is not there."""
        ...


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
        self._bytes: dict[int, bytes] = {}

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

    def token_bytes(self, token_id: int) -> bytes:
        """See `Tokenizer`."""
        table = self.byte_table
        if table is not None:
            return table.pieces[token_id] if 0 <= token_id < len(table.pieces) else b""
        piece = self._bytes.get(token_id)
        if piece is None:  # log-probabilities ask for the same thousands again and again
            before = self._word
            text = self.decode([*before, token_id], skip_special_tokens=False)
            piece = text[len(self.decode(before, skip_special_tokens=False)) :].encode()
            self._bytes[token_id] = piece
        return piece

    @cached_property
    def _word(self) -> list[int]:
        """A token that another one may follow in a text; [] if there is none."""
        return next(([token] for token in range(self.size) if self.decode([token]).isalpha()), [])

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

    @cached_property
    def byte_table(self) -> TokenBytes | None:
        """See `Tokenizer`."""
        return fast_token_bytes(self._tokenizer)


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
        return self.byte_table.decode(token_ids, skip_special_tokens)

    @cached_property
    def byte_table(self) -> TokenBytes:
        """See `Tokenizer`."""
        pieces, special = self.pieces()
        word = next((token for token, piece in enumerate(pieces) if piece[:1] == b" " != piece), None)
        keeps_space = word is not None and self._processor.decode([word]).startswith(" ")
        return TokenBytes(pieces, frozenset(special), each_byte=True, start="keep" if keeps_space else "once")

    def token_bytes(self, token_id: int) -> bytes:
        """See `Tokenizer`."""
        pieces = self.byte_table.pieces
        return pieces[token_id] if 0 <= token_id < len(pieces) else b""

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
    for name in ("tokenizer.json", "tokenizer.model"):
        if is_lfs_pointer(directory / name):
            raise RequestError(f"{directory / name} {LFS_POINTER}")
    if (directory / "tokenizer.json").is_file():
        return FastTokenizer(directory / "tokenizer.json")
    if (directory / "tokenizer.model").is_file():
        return SentencePieceTokenizer(directory / "tokenizer.model")
    return None
