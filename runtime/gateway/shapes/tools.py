"""Tools of a chat: functions that the model may call, and its calls."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType

from ..contracts import GatewayError
from ..tools.formats import ToolFormat
from ..tools.grammar import tool_grammar
from .common import Answer, Body, Ignored, Text

MAX_TOOLS = 128
FunctionName = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")]


class Function(Body, frozen=True, kw_only=True):
    """A function; `parameters`: a JSON schema of its arguments, which calls fit whether it is `strict` or not."""

    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body, frozen=True, kw_only=True):
    """A tool; there are functions only."""

    type: Literal["function"]
    function: Function


class ChosenFunction(Body, frozen=True, kw_only=True):
    """Which function."""

    name: FunctionName


class ChosenTool(Body, frozen=True, kw_only=True):
    """The function that the model must call."""

    type: Literal["function"]
    function: ChosenFunction


Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | ChosenTool


class CalledFunction(Body, frozen=True, kw_only=True):
    """A call's function, and its arguments as JSON text."""

    name: FunctionName
    arguments: Text
    parsed_arguments: Ignored = None


class PastCall(Body, frozen=True, kw_only=True):
    """A call that the model has made."""

    id: Annotated[str, Meta(max_length=256)]
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Ignored = None


class FunctionCall(Answer, frozen=True, kw_only=True):
    """What is called, and with what, as JSON text; in a stream what is new of both."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCall(Answer, frozen=True, kw_only=True):
    """A call."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class ToolCallDelta(Answer, frozen=True, kw_only=True):
    """What is new of a call; its id and type come with its first piece."""

    index: int
    function: FunctionCall
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


def offered(tools: list[Tool] | None, choice: str | ChosenTool | None) -> list[Tool]:
    """The tools that the model is told of. Raises GatewayError 400 that names the field."""
    given = [] if not tools or choice == "none" else tools
    names = [tool.function.name for tool in given]
    if len(set(names)) < len(names):
        raise GatewayError(400, "tools has a function's name twice; give each its own", param="tools")
    if not given and choice not in (None, "none", "auto"):
        raise GatewayError(400, "tool_choice asks for a call, and there are no tools", param="tool_choice")
    if isinstance(choice, ChosenTool) and choice.function.name not in names:
        raise GatewayError(
            400, f"tool_choice names {choice.function.name!r}, which is not among tools", param="tool_choice"
        )
    return given


def grammar_of(
    form: ToolFormat, tools: list[Tool], choice: str | ChosenTool | None, parallel: bool | None, answer: Any
) -> str:
    """What an answer with these tools may look like; `answer`: the schema of one without a call."""
    named = isinstance(choice, ChosenTool)
    functions = [
        (tool.function.name, tool.function.parameters)
        for tool in tools
        if not isinstance(choice, ChosenTool) or tool.function.name == choice.function.name
    ]
    return tool_grammar(
        form,
        functions,
        required=named or choice == "required",
        parallel=parallel is not False and not named,
        answer=answer,
    )


def for_template(tools: list[Tool]) -> list[dict[str, Any]]:
    """The tools as chat templates take them."""
    made = []
    for tool in tools:
        function = tool.function
        parameters = function.parameters or {"type": "object", "properties": {}}
        told = {"name": function.name, "description": function.description or "", "parameters": parameters}
        made.append({"type": "function", "function": told})
    return made
