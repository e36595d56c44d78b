"""Checks and normalizes messages: OpenAI's dicts and objects from HTTP, the clients and `LLM`.

Imports neither the engine nor torch.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any, TypeGuard

from ..api.checks import check_text
from ..api.errors import RequestError

Message = dict[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")
_OTHER_ROLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
# type of a text part -> key of its text
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_CLIENTS_OWN = ("index", "parsed_arguments")
_REASONING = ("reasoning_content", "thinking", "reasoning")  # keys of messages and types of parts


class ChatInputError(RequestError):
    """A message or an option of a chat is invalid. `param` names it, such as `messages[1].content`."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


def as_conversations(messages: Any) -> list[list[Message]]:
    """Return one or several conversations as a list, each message a dict for chat templates.

    `content` is a text or a list of {"type": "text", "text": ...}; `developer` becomes `system`, other roles are for
    the template to know; parts with reasoning move to `reasoning_content`; arguments of tool calls become objects;
    keys without a value are dropped, and unknown keys are kept. Raises ChatInputError.
    """
    if not is_list(messages):
        raise ChatInputError(
            f"messages must be a list of messages or a list of such lists, not {type(messages).__name__}", "messages"
        )
    several = messages if all(is_list(entry) for entry in messages) else [messages]
    made = []
    for index, conversation in enumerate(several):
        where = f"messages[{index}]" if several is messages else "messages"
        if not conversation:
            raise ChatInputError(f"{where} is empty; give at least one message", where)
        made.append([_message(entry, f"{where}[{place}]") for place, entry in enumerate(conversation)])
    return made


def is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    """Return whether the value is a sequence and not text."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def as_mapping(value: Any) -> Mapping[str, Any] | None:
    """Return the fields of a dict, a pydantic model or a dataclass; None for anything else."""
    if isinstance(value, Mapping):
        return value
    if callable(getattr(value, "model_dump", None)):
        dumped = value.model_dump()
        return dumped if isinstance(dumped, Mapping) else None
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return None


def _message(entry: Any, where: str) -> Message:
    fields = as_mapping(entry)
    if fields is None:
        raise ChatInputError(f"{where} must be a dict with a role and a content, not {type(entry).__name__}", where)
    made: Message = {str(key): value for key, value in fields.items() if value is not None}
    role = made.get("role")
    if not isinstance(role, str) or (role not in ROLES and not _OTHER_ROLE.fullmatch(role)):
        raise ChatInputError(
            f"{where}.role={role!r:.40} must be a name of letters, digits, '.', '_' and '-', such as 'user'",
            f"{where}.role",
        )
    if role == "function":
        raise ChatInputError(
            f"{where}.role='function' is not supported; write what a function returned as a message of the role 'tool'",
            f"{where}.role",
        )
    made["role"] = "system" if role == "developer" else role
    if not made.get("tool_calls", True):
        del made["tool_calls"]
    if "tool_calls" in made:
        made["tool_calls"] = _calls(made["tool_calls"], f"{where}.tool_calls")
    if role in ("assistant", "tool"):  # what a model or a function returned may be empty
        made.setdefault("content", made["refusal"] if isinstance(made.get("refusal"), str) else "")
    made["content"], thoughts = _content(made.get("content"), f"{where}.content")
    reasoning = next((made[key] for key in _REASONING if key in made), thoughts)
    if reasoning is not None:  # templates read one name or the other
        made = {"thinking": reasoning, **made, "reasoning_content": reasoning}
    return made


def _content(content: Any, where: str) -> tuple[str | list[dict[str, str]], str | None]:
    """Return the content, and the text of its parts with reasoning if there are any."""
    if content is None:
        raise ChatInputError(f"{where} is missing; give a text", where)
    if isinstance(content, str):
        check_text(where, content)
        return content, None
    if not is_list(content):
        raise ChatInputError(f"{where} must be a text or a list of text parts, not {type(content).__name__}", where)
    parts: list[dict[str, str]] = []
    thoughts: list[str] = []
    for place, part in enumerate(content):
        kind, text = _part(part, f"{where}[{place}]")
        if kind in _REASONING:
            thoughts.append(text)
        else:
            parts.append({"type": "text", "text": text})
    return parts, "\n".join(thoughts) if thoughts else None


def _part(part: Any, where: str) -> tuple[str, str]:
    """Return the type and the text of a part."""
    fields = {"type": "text", "text": part} if isinstance(part, str) else as_mapping(part) or {}
    kind = fields.get("type")
    text = None
    if isinstance(kind, str):
        text = (
            fields.get("thinking") or fields.get("text")
            if kind in _REASONING
            else fields.get(_TEXT_PARTS.get(kind, ""))
        )
    if not isinstance(kind, str) or not isinstance(text, str):
        raise ChatInputError(
            f"{where} is a content part of type {str(kind)[:40]!r}; the model reads text only: "
            '{"type": "text", "text": "..."}',
            where,
        )
    check_text(where, text)
    return kind, text


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not is_list(calls):
        raise ChatInputError(f"{where} must be a list, not {type(calls).__name__}", where)
    made = []
    for place, entry in enumerate(calls):
        fields = as_mapping(entry)
        if fields is None:
            raise ChatInputError(f"{where}[{place}] must be a dict, not {type(entry).__name__}", f"{where}[{place}]")
        call = _given(fields)
        function = as_mapping(call.get("function"))
        if function is not None:
            at = f"{where}[{place}].function.arguments"
            call["function"] = _given(function) | {"arguments": _arguments(function.get("arguments"), at)}
        made.append(call)
    return made


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with a value, without those that clients add."""
    return {key: value for key, value in fields.items() if value is not None and key not in _CLIENTS_OWN}


def _arguments(arguments: Any, where: str) -> Mapping[str, Any]:
    """Return the arguments as an object: OpenAI's clients keep them as JSON text, which templates would quote again."""
    if isinstance(arguments, str) or arguments is None:
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, Mapping):
        raise ChatInputError(f"{where} must be a JSON object, or one as text", where)
    return arguments
