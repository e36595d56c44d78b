"""Tools of a chat: bodies, formats of tool calls, and the grammar that constrains answers to valid calls."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType

from ...text.reasoning import NOT_REASONING
from ..interfaces import GatewayError
from .body_types import Answer, Body, Ignored, Part, Text


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes calls: `opener`, name, `middle`, arguments as JSON, `closer`; `separator` between two calls.

    text_before   whether text may precede the first call
    """

    opener: str
    middle: str
    closer: str
    separator: str
    text_before: bool

    def head(self, name: str) -> str:
        """Return the text before the arguments of a call of the function `name`."""
        return self.opener + json.dumps(name) + self.middle


HERMES = ToolFormat('<tool_call>\n{"name": ', ', "arguments": ', "}\n</tool_call>", "\n", True)


LLAMA3 = ToolFormat('{"name": ', ', "parameters": ', "}", "; ", False)


def format_of(chat_template: str | None) -> ToolFormat | None:
    """Return the format in a chat template (Hermes also for Qwen); None if it has no tools."""
    if chat_template is None or "tools" not in chat_template:
        return None
    if "<tool_call>" in chat_template:
        return HERMES
    return LLAMA3 if '"parameters"' in chat_template else None


MAX_TOOLS = 128
FunctionName = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")]


class Function(Body, frozen=True, kw_only=True):
    """A function. `parameters`: JSON schema of its arguments, which calls match even if `strict` is false."""

    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body, frozen=True, kw_only=True):
    """A tool. Only functions are supported."""

    type: Literal["function"]
    function: Function
    cache_control: Ignored = None
    defer_loading: Ignored = None


class ChosenFunction(Body, frozen=True, kw_only=True):
    """Name of a function."""

    name: FunctionName


class ChosenTool(Body, frozen=True, kw_only=True):
    """The function that the model must call."""

    type: Literal["function"]
    function: ChosenFunction


Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | ChosenTool


class CalledFunction(Part, frozen=True, kw_only=True):
    """A called function, and its arguments as JSON text or as an object."""

    name: FunctionName
    arguments: Text | dict[str, Any] | None = None


class PastCall(Part, frozen=True, kw_only=True):
    """A call in an earlier message."""

    id: Annotated[str, Meta(max_length=256)] | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class FunctionCall(Answer, frozen=True, kw_only=True):
    """Name and arguments (JSON text) of a call; in a stream, new parts of both."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCall(Answer, frozen=True, kw_only=True):
    """A call."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class ToolCallDelta(Answer, frozen=True, kw_only=True):
    """New part of a call. The first part has its id and type."""

    index: int
    function: FunctionCall
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


def offered_tools(tools: list[Tool] | None, choice: str | ChosenTool | None) -> list[Tool]:
    """Return the tools that the model may call. Raises GatewayError 400 that names the field."""
    offered = [] if not tools or choice == "none" else tools
    names = [tool.function.name for tool in offered]
    if len(set(names)) < len(names):
        raise GatewayError(400, "tools has two functions of the same name; rename one", param="tools")
    if not offered and choice not in (None, "none", "auto"):
        raise GatewayError(400, "tool_choice requires a call, but tools is empty", param="tool_choice")
    if isinstance(choice, ChosenTool) and choice.function.name not in names:
        raise GatewayError(
            400, f"tool_choice names {choice.function.name!r}, which is not among tools", param="tool_choice"
        )
    return offered


def grammar_of(
    tool_format: ToolFormat,
    tools: list[Tool],
    choice: str | ChosenTool | None,
    parallel: bool | None,
    answer: Any,
    thinks: bool = False,
) -> str:
    """Return the grammar of answers with these tools; see `tool_grammar`."""
    named = isinstance(choice, ChosenTool)
    functions = [
        (tool.function.name, _parameters(tool.function))
        for tool in tools
        if not isinstance(choice, ChosenTool) or tool.function.name == choice.function.name
    ]
    return tool_grammar(
        tool_format,
        functions,
        required=named or choice == "required",
        parallel=parallel is not False and not named,
        answer=answer,
        thinks=thinks,
    )


def _parameters(function: Function) -> dict[str, Any] | None:
    """Return the schema of a function's arguments, without what a grammar cannot express unless it is `strict`."""
    if function.parameters is None or function.strict:
        return function.parameters
    return {**function.parameters, "x-guidance": {"lenient": True}}


def for_template(tools: list[Tool]) -> list[dict[str, Any]]:
    """Return the tools in the format of chat templates."""
    entries: list[dict[str, Any]] = []
    for tool in tools:
        function = tool.function
        parameters = function.parameters or {"type": "object", "properties": {}}
        entry = {"name": function.name, "description": function.description or "", "parameters": parameters}
        entries.append({"type": "function", "function": entry})
    return entries


WHITESPACE = r"[ \n\r\t]{0,32}"
ANYTHING = r"/(.|\n)*/"


def tool_grammar(
    tool_format: ToolFormat,
    functions: Sequence[tuple[str, Mapping[str, Any] | None]],
    *,
    required: bool,
    parallel: bool,
    answer: Any = None,
    thinks: bool = False,
) -> str:
    """Return a grammar in Lark's notation. An answer is free text or matches `answer` until a call begins.

    A call names one of `functions`, and its arguments match the function's schema.

    functions   names, and schemas of arguments
    required    whether there must be a call
    parallel    whether several calls are allowed
    answer      schema of an answer without calls; None: any text
    thinks      whether free text may not begin with reasoning, in which an opener of a call is only text
    """
    lines, unlike = [], f" & {NOT_REASONING}" if thinks else ""
    if required or answer is not None:
        more = f" ({json.dumps(tool_format.separator)} call)*" if parallel else ""
        lines.append(f"start: calls{'' if required else ' | answer'}")
        lines.append(f"calls: call{more}")
        if not required:
            lines.append(f"answer: {_json(answer)}")
        lines.append(f"call: {json.dumps(tool_format.opener)} body")
    elif tool_format.text_before:
        # free text until the first match of the opener, once per allowed call
        lines += [f"start: call{'*' if parallel else '?'} TEXT", f"TEXT: {ANYTHING}{unlike}", "call: trigger body"]
        lines.append(f"trigger[lazy]: TEXT {json.dumps(tool_format.opener)}")
    else:
        more = f" ({json.dumps(tool_format.separator)} call)*" if parallel else ""
        lines += [f"start: calls | TEXT | {json.dumps('')}", f"calls: call{more}", rf"TEXT: /[^{{](.|\n)*/{unlike}"]
        lines.append(f"call: {json.dumps(tool_format.opener)} body")
    lines.append("body: " + " | ".join(f"f{index}" for index in range(len(functions))))
    for index, (name, schema) in enumerate(functions):
        head, closer = _quoted(json.dumps(name) + tool_format.middle), _quoted(tool_format.closer)
        lines.append(f"f{index}: {head} {_json(_object(schema))} {closer}")
    return "\n".join(lines) + "\n"


def _object(schema: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the schema with `type` set, because arguments are an object even if the schema has no type."""
    return {"type": "object", **(schema or {"properties": {}, "additionalProperties": False})}


def _json(schema: Any) -> str:
    if isinstance(schema, dict):
        given = schema.get("x-guidance", {})
        schema = {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE, **given}}
    return "%json " + json.dumps(schema)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
