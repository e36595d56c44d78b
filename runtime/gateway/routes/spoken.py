"""An answer's text as a chat's message: what the model says, and the functions that it calls."""

from collections.abc import Iterable
from typing import Any
from uuid import uuid4

from msgspec import UNSET

from ..shapes.chat import AnswerMessage, ChatDelta
from ..shapes.tools import FunctionCall, ToolCall, ToolCallDelta
from ..tools.formats import ToolFormat
from ..tools.parser import CallPiece, ToolParser


class Spoken:
    """Takes one answer in. `form`: how the model spells calls of the functions `names`; None: it has no tools."""

    def __init__(self, form: ToolFormat | None, names: Iterable[str]) -> None:
        self._parser = None if form is None else ToolParser(form, names)

    @property
    def is_text(self) -> bool:
        """Whether all that the model says is content."""
        return self._parser is None

    def message(self, text: str) -> AnswerMessage:
        """A whole answer."""
        if self._parser is None:
            return AnswerMessage(role="assistant", content=text)
        pieces = self._parser.push(text, last=True)
        calls = [
            ToolCall(id=_new_id(), function=FunctionCall(name=piece.name or "", arguments=piece.arguments))
            for piece in pieces.calls
        ]
        content = pieces.content if pieces.content or not calls else None
        return AnswerMessage(role="assistant", content=content, tool_calls=calls or UNSET)

    def delta(self, text: str, last: bool) -> ChatDelta | None:
        """More of an answer; None if there is nothing to tell yet. `last`: nothing follows."""
        if self._parser is None:
            return ChatDelta(content=text) if text else None
        pieces = self._parser.push(text, last)
        if not pieces.content and not pieces.calls:
            return None
        return ChatDelta(content=pieces.content or UNSET, tool_calls=list(map(_call_delta, pieces.calls)) or UNSET)

    def reason(self, reason: Any) -> Any:
        """Why the answer ended: `tool_calls` for one that is complete and calls a function."""
        called = self._parser is not None and self._parser.calls > 0
        return "tool_calls" if reason == "stop" and called else reason


def _call_delta(piece: CallPiece) -> ToolCallDelta:
    if piece.name is None:
        return ToolCallDelta(index=piece.index, function=FunctionCall(arguments=piece.arguments))
    function = FunctionCall(name=piece.name, arguments=piece.arguments)
    return ToolCallDelta(index=piece.index, function=function, id=_new_id(), type="function")


def _new_id() -> str:
    return f"call_{uuid4().hex[:24]}"
