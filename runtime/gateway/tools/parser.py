"""An answer's text, as it comes, taken apart into what the model says and the functions that it calls."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from .formats import ToolFormat


@dataclass
class CallPiece:
    """What is new of call number `index`: its name when it begins, then more of its arguments' JSON text."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass
class Pieces:
    """What a piece of text brought."""

    content: str = ""
    calls: list[CallPiece] = field(default_factory=list)


class ToolParser:
    """Takes one answer's text in. `names`: the functions that there are; `calls`: how many have begun."""

    def __init__(self, form: ToolFormat, names: Iterable[str]) -> None:
        self._form = form
        self._heads = {form.head(name): name for name in names}
        self._buffer = ""
        self._said = False  # content other than white space
        self._space = ""  # white space that is told if content follows
        self._arguments: _End | None = None  # in the midst of a call's arguments
        self.calls = 0

    def push(self, text: str, last: bool = False) -> Pieces:
        """What can be told now; `last`: nothing follows."""
        self._buffer += text
        pieces = Pieces()
        while self._arguments_of(pieces) if self._arguments is not None else self._text_of(pieces, last):
            pass
        if last and self._arguments is None:
            if not self._is_separator(self._buffer):
                self._say(pieces, self._buffer)
            if not self.calls:
                pieces.content += self._space
            self._buffer = self._space = ""
        return pieces

    def _text_of(self, pieces: Pieces, last: bool) -> bool:
        """Content up to the next call; returns whether one begins."""
        opener = self._form.opener
        place = self._buffer.find(opener)
        if place < 0:
            # what may be the beginning of an opener stays
            held = next((n for n in range(len(opener) - 1, 0, -1) if self._buffer.endswith(opener[:n])), 0)
            known = self._buffer[: len(self._buffer) - held]
            if not self._is_separator(known):
                self._say(pieces, known)
                self._buffer = self._buffer[len(known) :]
            return False
        rest = self._buffer[place:]
        head = next((head for head in self._heads if rest.startswith(head)), None)
        before = self._buffer[:place]
        alone = self._form.text_before or (not self._said and (not before or self._is_separator(before)))
        if head is None or not alone:
            if alone and not last and any(each.startswith(rest) for each in self._heads):
                return False
            self._say(pieces, self._buffer[: place + len(opener)])
            self._buffer = self._buffer[place + len(opener) :]
            return True
        if not self._is_separator(before):
            self._say(pieces, before)
        self._space, self._buffer = "", rest[len(head) :]
        pieces.calls.append(CallPiece(self.calls, self._heads[head]))
        self.calls += 1
        self._arguments = _End()
        return True

    def _arguments_of(self, pieces: Pieces) -> bool:
        """More of a call's arguments; returns whether they are complete."""
        end = self._arguments
        if end is None or not self._buffer:
            return False
        count = end.find(self._buffer)
        said, self._buffer = self._buffer[:count], self._buffer[count:]
        if said:
            if pieces.calls and pieces.calls[-1].index == self.calls - 1:
                pieces.calls[-1].arguments += said
            else:
                pieces.calls.append(CallPiece(self.calls - 1, None, said))
        if not end.reached:
            return False
        closer = self._form.closer
        if len(self._buffer) < len(closer) and closer.startswith(self._buffer):
            return False
        self._buffer = self._buffer.removeprefix(closer)
        self._arguments = None
        return True

    def _is_separator(self, text: str) -> bool:
        """Whether a text after a call stands between it and the next one."""
        return self.calls > 0 and not text.strip(self._form.separator)

    def _say(self, pieces: Pieces, text: str) -> None:
        """Content, but for white space at its end."""
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        self._said |= bool(kept)
        pieces.content += kept


class _End:
    """Looks for the end of a JSON object."""

    def __init__(self) -> None:
        self._depth = 0
        self._string = self._escaped = self.reached = False

    def find(self, text: str) -> int:
        """How many of the next characters belong to the object."""
        if self.reached:
            return 0
        for place, letter in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._string:
                self._escaped, self._string = letter == "\\", letter != '"'
            elif letter == '"':
                self._string = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.reached = True
                    return place + 1
        return len(text)
