"""Builds the output items of an answer from its chunks, with their events."""

from collections.abc import Sequence
from typing import Any, Literal

from ....protocol.messages import TokenLogprob
from ..context import new_id
from ..logprobs import ChatLogprob, chat_logprobs
from ..tool_call_parser import AnswerParser, CallDelta
from .output import FunctionCallItem, OutputItem, OutputMessage, OutputText, RawMessage, ReasoningItem, ReasoningText

Event = tuple[str, dict[str, Any]]
"""(type, fields) of an event without its number."""
Kind = Literal["reasoning", "message", "function_call"]
_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
_TEXTS = {"reasoning": "response.reasoning_text", "message": "response.output_text"}


class _OpenItem:
    """The item that the answer is writing. `text`: its text, or a call's arguments."""

    def __init__(self, kind: Kind, name: str = "") -> None:
        self.kind, self.id = kind, new_id(_PREFIXES[kind])
        self.name, self.call_id = name, new_id("call") if kind == "function_call" else ""
        self.text = ""
        self.logprobs: list[ChatLogprob] = []

    def part(self) -> OutputText | ReasoningText:
        """Return the part of the content with the text so far."""
        if self.kind == "reasoning":
            return ReasoningText(text=self.text)
        return OutputText(text=self.text, logprobs=self.logprobs)

    def item(self, status: Literal["in_progress", "completed", "incomplete"]) -> OutputItem:
        """Return the item with the text so far; without content while it is in progress."""
        if self.kind == "function_call":
            return FunctionCallItem(
                id=self.id, status=status, call_id=self.call_id, name=self.name, arguments=self.text
            )
        part = self.part()
        if isinstance(part, ReasoningText):
            return ReasoningItem(id=self.id, status=status, content=[] if status == "in_progress" else [part])
        return OutputMessage(id=self.id, status=status, content=[] if status == "in_progress" else [part])


class OutputBuilder:
    """Builds the output of one answer.

    top      number of alternatives per token in log-probabilities
    output   finished items
    """

    def __init__(self, parser: AnswerParser, top: int) -> None:
        self._parser, self._top = parser, top
        self.output: list[OutputItem] = []
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._open: _OpenItem | None = None
        self._events: list[Event] = []
        self._logprobs: list[list[TokenLogprob]] = []  # of tokens whose text is not sent yet
        self._num_tokens = 0  # with log-probabilities

    def push(
        self, text: str, last: bool, token_ids: Sequence[int], logprobs: list[list[TokenLogprob]] | None
    ) -> list[Event]:
        """Add text. Returns the events to send. `last`: the text is complete."""
        self._texts.append(text)
        self._token_ids += token_ids
        parsed = self._parser.push(text, last, token_ids)
        self._logprobs += logprobs or []
        self._num_tokens += len(logprobs or [])
        if parsed.reasoning:
            self._add_text("reasoning", parsed.reasoning)
        if parsed.content:
            self._add_text("message", parsed.content)
        for call in parsed.calls:
            self._add_call(call)
        return self._take_events()

    def finish(self, cut_off: bool) -> list[Event]:
        """Close the last item. Returns the events to send. `cut_off`: the answer ended at the limit of its tokens."""
        if self._open is None:
            self._begin("message")
        elif self._open.kind == "message" and self._logprobs:
            self._add_text("message", "")
        self._close("incomplete" if cut_off else "completed")
        return self._take_events()

    @property
    def raw(self) -> RawMessage:
        """The text and the tokens so far."""
        return RawMessage(message="".join(self._texts), tokens=self._token_ids)

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _take_logprobs(self) -> list[ChatLogprob]:
        """Return the log-probabilities of unsent tokens after the reasoning."""
        first = self._num_tokens - len(self._logprobs)
        logprobs, self._logprobs = self._logprobs[max(0, self._parser.reasoning.num_tokens - first) :], []
        return chat_logprobs(logprobs, self._top).content

    def _add_text(self, kind: Literal["reasoning", "message"], text: str) -> None:
        opened = self._open
        if opened is None or opened.kind != kind:
            opened = self._begin(kind)
        opened.text += text
        fields: dict[str, Any] = {"delta": text}
        if kind == "message":
            fields["logprobs"] = self._take_logprobs()
            opened.logprobs += fields["logprobs"]
        self._add_event(f"{_TEXTS[kind]}.delta", opened, content_index=0, **fields)

    def _add_call(self, call: CallDelta) -> None:
        self._logprobs = []
        opened = self._open
        if opened is None or call.name is not None:
            opened = self._begin("function_call", call.name or "")
        if call.arguments:
            opened.text += call.arguments
            self._add_event("response.function_call_arguments.delta", opened, delta=call.arguments)

    def _begin(self, kind: Kind, name: str = "") -> _OpenItem:
        """Close the open item and open another one."""
        self._close("completed")
        self._open = opened = _OpenItem(kind, name)
        fields = {"output_index": len(self.output), "item": opened.item("in_progress")}
        self._events.append(("response.output_item.added", fields))
        if kind != "function_call":
            self._add_event("response.content_part.added", opened, content_index=0, part=opened.part())
        return opened

    def _close(self, status: Literal["completed", "incomplete"]) -> None:
        opened = self._open
        if opened is None:
            return
        if opened.kind == "function_call":
            done = {"name": opened.name, "arguments": opened.text}
            self._add_event("response.function_call_arguments.done", opened, **done)
        else:
            part = opened.part()
            fields: dict[str, Any] = {"logprobs": part.logprobs} if isinstance(part, OutputText) else {}
            self._add_event(f"{_TEXTS[opened.kind]}.done", opened, content_index=0, text=part.text, **fields)
            self._add_event("response.content_part.done", opened, content_index=0, part=part)
        item = opened.item(status)
        self._events.append(("response.output_item.done", {"output_index": len(self.output), "item": item}))
        self.output.append(item)
        self._open = None

    def _add_event(self, kind: str, opened: _OpenItem, **fields: Any) -> None:
        """Add an event about the open item."""
        self._events.append((kind, {"item_id": opened.id, "output_index": len(self.output), **fields}))
