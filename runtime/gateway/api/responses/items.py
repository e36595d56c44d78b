"""Items of the input of a response, and their conversion to messages of a chat."""

from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import Meta, structs

from ...interfaces import GatewayError
from ..body_types import Part, Text
from ..chat.request import MAX_MESSAGES, ChatMessage, TextPart
from ..tools import CalledFunction, FunctionName, PastCall

Id = Annotated[str, Meta(max_length=256)]


class InputPart(Part, frozen=True, kw_only=True):
    """A part of an item. `output_text` and `refusal` are from an earlier answer."""

    type: Literal["input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"]
    text: Text = ""
    refusal: Text = ""


Parts = Annotated[list[InputPart], Meta(max_length=MAX_MESSAGES)]


class InputItem(Part, frozen=True, kw_only=True):
    """An item of the conversation. Its type decides which of the other fields it needs.

    message               role, content; the default type
    function_call         call_id, name, arguments: a call in an earlier answer
    function_call_output  call_id, output: the result of a call
    reasoning             summary or content, for the next message of the assistant
    item_reference        id of an item of a stored response
    """

    type: Literal["message", "function_call", "function_call_output", "reasoning", "item_reference"] | None = None
    id: Id | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Text | Parts | None = None
    call_id: Id | None = None
    name: FunctionName | None = None
    arguments: Text | None = None
    output: Text | Parts | None = None
    summary: Parts | None = None


def messages_of(items: Sequence[InputItem]) -> list[ChatMessage]:
    """Return the messages. Reasoning, text and calls of one answer become one message.

    items   without references; `ResponseStore.conversation` replaces them

    Raises GatewayError 400 that names the item.
    """
    messages: list[ChatMessage] = []
    reasoning = ""
    for index, item in enumerate(items):
        where = f"input[{index}]"
        if item.type == "reasoning":
            reasoning += _text(item.content) or _text(item.summary)
            continue
        if item.type == "function_call_output":
            if item.output is None:
                raise _missing(where, "output")
            messages.append(ChatMessage(role="tool", content=_parts(item.output), tool_call_id=item.call_id))
        elif item.type == "function_call":
            _add_call(messages, _call(item, where), reasoning)
        else:
            if item.role is None:
                raise _missing(where, "role")
            if item.content is None and item.role != "assistant":
                raise _missing(where, "content")
            thought = reasoning if item.role == "assistant" else ""
            content = _parts(item.content or "")
            messages.append(ChatMessage(role=item.role, content=content, reasoning_content=thought or None))
        reasoning = ""
    return messages


def _add_call(messages: list[ChatMessage], call: PastCall, reasoning: str) -> None:
    """Add a call to the message of the answer that made it."""
    last = messages[-1] if messages and messages[-1].role == "assistant" and not reasoning else None
    if last is None:
        last = ChatMessage(role="assistant", content="", reasoning_content=reasoning or None)
        messages.append(last)
    messages[-1] = structs.replace(last, tool_calls=[*(last.tool_calls or ()), call])


def _call(item: InputItem, where: str) -> PastCall:
    if item.name is None:
        raise _missing(where, "name")
    if item.arguments is None:
        raise _missing(where, "arguments")
    if item.call_id is None:
        raise _missing(where, "call_id")
    return PastCall(id=item.call_id, function=CalledFunction(name=item.name, arguments=item.arguments))


def _missing(where: str, name: str) -> GatewayError:
    return GatewayError(400, f"{where}.{name} is missing; add it", param=f"{where}.{name}")


def _text(content: str | list[InputPart] | None) -> str:
    return content if isinstance(content, str) else "\n".join(part.text or part.refusal for part in content or ())


def _parts(content: str | list[InputPart]) -> str | list[TextPart]:
    if isinstance(content, str):
        return content
    return [TextPart(type="text", text=part.text or part.refusal) for part in content]
