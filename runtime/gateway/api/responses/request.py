"""Bodies of /v1/responses, and their conversion to a chat."""

from typing import Annotated, Any, Literal

from msgspec import Meta

from ....text.reasoning import template_variables
from ...interfaces import GatewayError
from ..body_types import Body, Ignored, Part, TemplateText, TemplateVariables, Text
from ..chat.request import MAX_MESSAGES, ChatMessage, ChatRequest
from ..field_table import refuse_unsupported, with_table_fields
from ..response_format import JsonSchemaFormat, ResponseFormat, Schema
from ..sampling_fields import GenerationBody, LogprobCount, ThinkingBudget, TokenCount
from ..tools import MAX_TOOLS, ChosenFunction, ChosenTool, Function, FunctionName, Tool
from .items import Id, InputItem

LOGPROBS = "message.output_text.logprobs"
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
"""Only the first one has an effect: reasoning is in clear text, and the other items do not occur."""


class ResponseTextFormat(Body, frozen=True, kw_only=True):
    """Like `response_format` of a chat, with the schema's fields next to `type`."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Meta(max_length=256)] | None = None
    schema: Schema | None = None
    description: Text | None = None
    strict: bool | None = None

    def as_response_format(self) -> ResponseFormat:
        """Return the equivalent `response_format`. Raises GatewayError 400."""
        if self.type == "json_schema" and self.schema is None:
            raise GatewayError(400, "text.format.schema is missing; give a JSON schema", param="text.format")
        schema = JsonSchemaFormat(name=self.name or "", schema=self.schema, strict=self.strict)
        return ResponseFormat(type=self.type, json_schema=schema if self.type == "json_schema" else None)


class TextOptions(Body, frozen=True, kw_only=True):
    """`format`: any text, any JSON object, or JSON that matches a schema. `verbosity` has no effect."""

    format: ResponseTextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(Body, frozen=True, kw_only=True):
    """`effort`: a variable of the chat template; "none" also sets enable_thinking to false. No summaries are made."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Ignored = None
    context: Ignored = None
    mode: Ignored = None


class FunctionTool(Part, frozen=True, kw_only=True):
    """A function. `parameters`: JSON schema of its arguments, which calls match even if `strict` is false."""

    type: Literal["function"]
    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenName(Part, frozen=True, kw_only=True, tag_field="type", tag="function"):
    """The function that the model must call."""

    name: FunctionName


class AllowedTool(Part, frozen=True, kw_only=True):
    """A function that the model may call."""

    type: Literal["function"]
    name: FunctionName


class AllowedTools(Part, frozen=True, kw_only=True, tag_field="type", tag="allowed_tools"):
    """The functions that the model may call, or with the mode "required" must call."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Meta(max_length=MAX_TOOLS)]


class ResponseStreamOptions(Body, frozen=True, kw_only=True):
    """`include_obfuscation` is ignored."""

    include_obfuscation: bool | None = None


@with_table_fields("responses")
class ResponseRequest(GenerationBody, frozen=True, kw_only=True):
    """A conversation. `store` (default: true), `background` (answer at once with the status "queued") and
    `previous_response_id` are of stored responses.
    """

    input: Text | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_MESSAGES)]
    instructions: Text | None = None
    max_output_tokens: TokenCount | None = None
    top_logprobs: LogprobCount | None = None
    include: Annotated[list[Includable], Meta(max_length=16)] | None = None
    stream_options: ResponseStreamOptions | None = None
    text: TextOptions | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None
    truncation: (
        Annotated[Literal["auto", "disabled"], Meta(description="no effect: an input that is too long is refused")]
        | None
    ) = None
    tools: Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenName | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    chat_template: TemplateText | None = None
    chat_template_kwargs: TemplateVariables | None = None
    thinking_token_budget: ThinkingBudget = None
    receipt: bool | None = None
    enable_response_messages: Annotated[bool, Meta(description="show prompt and answer as text and tokens")] | None = (
        None
    )
    store: bool | None = None
    background: bool | None = None
    previous_response_id: Id | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer contains log-probabilities."""
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    def as_chat(self, messages: list[ChatMessage]) -> ChatRequest:
        """Return the body of a chat with these messages and the instructions. Raises GatewayError 400."""
        refuse_unsupported(self)
        if self.instructions:
            messages = [ChatMessage(role="system", content=self.instructions), *messages]
        effort = None if self.reasoning is None else self.reasoning.effort
        form = None if self.text is None or self.text.format is None else self.text.format.as_response_format()
        tools, choice = self._tools()
        return ChatRequest(
            **{name: getattr(self, name) for name in _SHARED_FIELDS},
            messages=messages,
            max_completion_tokens=self.max_output_tokens,
            logprobs=self.wants_logprobs,
            response_format=form,
            tools=tools,
            tool_choice=choice,
            chat_template_kwargs=template_variables(effort) | (self.chat_template_kwargs or {}),
            return_token_ids=self.enable_response_messages,
        )

    def _tools(self) -> tuple[list[Tool], Any]:
        """Return the tools and the choice of the same chat."""
        choice, tools = self.tool_choice, self.tools or []
        if isinstance(choice, AllowedTools):
            names = {tool.name for tool in tools}
            for index, tool in enumerate(choice.tools):
                if tool.name not in names:
                    where = f"tool_choice.tools[{index}].name"
                    raise GatewayError(400, f"{where} is {tool.name!r}, which is not among tools", param=where)
            allowed = {tool.name for tool in choice.tools}
            tools, choice = [tool for tool in tools if tool.name in allowed], choice.mode
        made = [
            Tool(
                type="function",
                function=Function(
                    name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
                ),
            )
            for tool in tools
        ]
        if isinstance(choice, ChosenName):
            return made, ChosenTool(type="function", function=ChosenFunction(name=choice.name))
        return made, choice


_DIFFERENT = {
    "tools", "tool_choice", "stream_options", "metadata", "chat_template_kwargs", "logprob_token_ids",
    "use_beam_search", "length_penalty", "kv_transfer_params", "return_token_ids",
}  # fmt: skip
_SHARED_FIELDS = sorted(set(ResponseRequest.__struct_fields__) & set(ChatRequest.__struct_fields__) - _DIFFERENT)
"""Fields with the same meaning in both bodies."""
