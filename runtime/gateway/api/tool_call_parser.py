"""Splits generated text, as it arrives, into reasoning, content and tool calls."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ...text.reasoning import ReasoningParser
from .tools import ToolFormat


@dataclass
class CallDelta:
    """New part of call number `index`: its name in the first part, then JSON text of its arguments."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass
class ParsedText:
    """Reasoning, content and parts of calls in a piece of text."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)


class AnswerParser:
    """Parses the text of one answer: reasoning, then content and tool calls.

    tool_format   how the model writes tool calls; None: it has no tools
    names         names of the functions that it may call
    """

    def __init__(self, reasoning: ReasoningParser, tool_format: ToolFormat | None, names: Iterable[str]) -> None:
        self.reasoning = reasoning
        self._tools = None if tool_format is None else ToolParser(tool_format, names)

    @property
    def is_plain_text(self) -> bool:
        """Whether all text from now on is content, unchanged."""
        return self._tools is None and self.reasoning.is_done

    @property
    def num_calls(self) -> int:
        """Number of calls so far."""
        return 0 if self._tools is None else self._tools.calls

    def push(self, text: str, last: bool = False, token_ids: Sequence[int] = ()) -> ParsedText:
        """Add text. Returns what can be sent. `last`: the text is complete; `token_ids`: of this text."""
        split = self.reasoning.push(text, last, token_ids)
        parsed = ParsedText(content=split.content) if self._tools is None else self._tools.push(split.content, last)
        parsed.reasoning = split.reasoning
        return parsed


class ToolParser:
    """Parses the text of one answer. `names`: names of the functions; `calls`: number of calls so far."""

    def __init__(self, tool_format: ToolFormat, names: Iterable[str]) -> None:
        self._format = tool_format
        self._heads = {tool_format.head(name): name for name in names}
        self._buffer = ""
        self._has_content = False  # other than white space
        self._space = ""  # trailing white space, sent if content follows
        self._arguments: _ObjectEnd | None = None  # set inside a call's arguments
        self.calls = 0

    def push(self, text: str, last: bool = False) -> ParsedText:
        """Add text. Returns the content and calls that can be sent. `last`: the text is complete."""
        self._buffer += text
        parsed = ParsedText()
        while self._parse_arguments(parsed) if self._arguments is not None else self._parse_text(parsed, last):
            pass
        if last and self._arguments is None:
            if not self._is_separator(self._buffer):
                self._add_content(parsed, self._buffer)
            if not self.calls:
                parsed.content += self._space
            self._buffer = self._space = ""
        return parsed

    def _parse_text(self, parsed: ParsedText, last: bool) -> bool:
        """Parse content up to the next call. Returns whether there is more to parse."""
        opener = self._format.opener
        start = self._buffer.find(opener)
        if start < 0:
            # keep a possible start of an opener
            held = next((n for n in range(len(opener) - 1, 0, -1) if self._buffer.endswith(opener[:n])), 0)
            complete = self._buffer[: len(self._buffer) - held]
            if not self._is_separator(complete):
                self._add_content(parsed, complete)
                self._buffer = self._buffer[len(complete) :]
            return False
        rest = self._buffer[start:]
        head = next((head for head in self._heads if rest.startswith(head)), None)
        before = self._buffer[:start]
        alone = self._format.text_before or (not self._has_content and (not before or self._is_separator(before)))
        if head is None or not alone:
            if alone and not last and any(each.startswith(rest) for each in self._heads):
                return False
            self._add_content(parsed, self._buffer[: start + len(opener)])
            self._buffer = self._buffer[start + len(opener) :]
            return True
        if not self._is_separator(before):
            self._add_content(parsed, before)
        self._space, self._buffer = "", rest[len(head) :]
        parsed.calls.append(CallDelta(self.calls, self._heads[head]))
        self.calls += 1
        self._arguments = _ObjectEnd()
        return True

    def _parse_arguments(self, parsed: ParsedText) -> bool:
        """Parse arguments of a call. Returns whether they are complete."""
        end = self._arguments
        if end is None or not self._buffer:
            return False
        count = end.find(self._buffer)
        text, self._buffer = self._buffer[:count], self._buffer[count:]
        if text:
            if parsed.calls and parsed.calls[-1].index == self.calls - 1:
                parsed.calls[-1].arguments += text
            else:
                parsed.calls.append(CallDelta(self.calls - 1, None, text))
        if not end.reached:
            return False
        closer = self._format.closer
        if len(self._buffer) < len(closer) and closer.startswith(self._buffer):
            return False
        self._buffer = self._buffer.removeprefix(closer)
        self._arguments = None
        return True

    def _is_separator(self, text: str) -> bool:
        """Return whether a text after a call only separates it from the next one."""
        return self.calls > 0 and not text.strip(self._format.separator)

    def _add_content(self, parsed: ParsedText, text: str) -> None:
        """Add content, without white space at its end."""
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        self._has_content |= bool(kept)
        parsed.content += kept


class _ObjectEnd:
    """Finds the end of a JSON object."""

    def __init__(self) -> None:
        self._depth = 0
        self._string = self._escaped = self.reached = False

    def find(self, text: str) -> int:
        """Return how many of the next characters belong to the object."""
        if self.reached:
            return 0
        for index, letter in enumerate(text):
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
                    return index + 1
        return len(text)
