"""Bodies of /v1/chat/completions, and their messages for chat templates."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Any, Literal

from msgspec import Meta, field, structs, to_builtins

from ....api.sampling_params import SamplingParams
from ....text.reasoning import template_variables
from ...interfaces import GatewayError, ModelInfo
from ..body_types import (
    Body,
    Part,
    Refused,
    TemplateText,
    TemplateVariables,
    Text,
    TokenIds,
)
from ..field_table import with_table_fields
from ..response_format import make_constraint, schema_of
from ..sampling_fields import LogprobCount, ThinkingBudget, TokenBody, TokenCount, sampling_params
from ..tools import (
    MAX_TOOLS,
    PastCall,
    Tool,
    ToolChoice,
    ToolFormat,
    Tools,
    grammar_of,
    offered_tools,
)

MAX_MESSAGES = 4096
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
_NO_TEXT = "".join(("no", "text"))
"""Stands for a missing text, known by its identity, so that `text` always has the type of a text."""
Role = Annotated[
    str,
    Meta(max_length=64, description="system, developer, user, assistant, tool, or a role of the chat template"),
]


class TextPart(Part, frozen=True, kw_only=True):
    """A part of a message's content. `text` is also set for the refusal or the reasoning of an earlier answer."""

    type: Literal["text", "input_text", "output_text", "refusal", "thinking", "reasoning"]
    text: Text = field(default_factory=lambda: _NO_TEXT)
    refusal: Text | None = None
    thinking: Text | None = None

    def __post_init__(self) -> None:
        if self.text is _NO_TEXT:
            name = self.type if self.type in ("refusal", "thinking") else "text"
            text = getattr(self, name)
            if text is None or text is _NO_TEXT:
                raise ValueError(f"Object missing required field `{name}`")
            structs.force_setattr(self, "text", text)


class ChatMessage(Part, frozen=True, kw_only=True):
    """One message. `developer` is the same as `system`; other roles than these five are for the template to know."""

    role: Role
    content: Text | Annotated[list[TextPart], Meta(max_length=MAX_MESSAGES)] | None = None
    name: Annotated[str, Meta(max_length=256)] | None = None
    tool_call_id: Annotated[str, Meta(max_length=256)] | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    refusal: Text | None = None
    audio: Refused = None
    tool_calls: Annotated[list[PastCall], Meta(max_length=MAX_TOOLS)] | None = None
    function_call: Refused = None


class KvTransferParams(Body, frozen=True, kw_only=True):
    """Tokens of a prompt that another server has rendered, as in vLLM. An engine computes prompts and answers, so there
    are no other parameters of a transfer.
    """

    prompt_token_ids: Annotated[TokenIds, Meta(min_length=1)] | None = None


@with_table_fields("chat")
class ChatRequest(TokenBody, frozen=True, kw_only=True):
    """A conversation. The model's chat template turns it into a prompt.

    `echo`: the answer begins with the content of the last message, if that is the assistant's. With
    `kv_transfer_params.prompt_token_ids` these are the prompt.
    """

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    logprobs: bool | None = None
    top_logprobs: LogprobCount | None = None
    max_completion_tokens: TokenCount | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    chat_template: TemplateText | None = None
    chat_template_kwargs: TemplateVariables | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: ThinkingBudget = None
    kv_transfer_params: KvTransferParams | None = None
    documents: Annotated[list[dict[str, Any]], Meta(max_length=MAX_MESSAGES)] | None = None

    @property
    def constraint_field(self) -> str:
        """The field that sets a constraint on the answer."""
        return "tools" if self.offered_tools else super().constraint_field

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the model may call. Raises GatewayError 400 that names the field."""
        return offered_tools(self.tools, self.tool_choice)

    def with_tools(self, params: SamplingParams, tool_format: ToolFormat | None, thinks: bool) -> SamplingParams:
        """Return `params` constrained to text and tool calls in `tool_format`. Raises GatewayError 400.

        thinks   whether the answer may begin with reasoning
        """
        if tool_format is None:
            raise GatewayError(
                400,
                "tools: the model's chat template has no supported tool format (Llama 3's, Hermes', Qwen's)",
                code="unsupported_parameter",
                param="tools",
            )
        if self.structured_outputs is not None:
            text = "structured_outputs and tools exclude each other; use response_format"
            raise GatewayError(400, text, param="structured_outputs")
        answer = schema_of(self.response_format)
        grammar = grammar_of(
            tool_format, self.offered_tools, self.tool_choice, self.parallel_tool_calls, answer, thinks
        )
        return replace(params, structured_outputs=make_constraint("tools", grammar=grammar))

    def continued_text(self) -> str:
        """Return the text of the last message if the answer continues it, else ""."""
        content = self.messages[-1].content if self.continue_final_message else None
        return content if isinstance(content, str) else "".join(part.text for part in content or ())

    def conversation(self) -> list[dict[str, Any]]:
        """Return the messages for the chat template. Raises GatewayError 400 that names the field."""
        return template_messages(self.messages)

    @property
    def given_ids(self) -> list[int] | None:
        """The tokens of the prompt, if the body has them."""
        return None if self.kv_transfer_params is None else self.kv_transfer_params.prompt_token_ids

    @property
    def template_variables(self) -> dict[str, Any]:
        """Further variables of the chat template."""
        variables: dict[str, Any] = {} if self.documents is None else {"documents": self.documents}
        variables |= template_variables(self.reasoning_effort)
        return variables | (self.chat_template_kwargs or {})

    @property
    def echoed(self) -> str:
        """The text before each answer."""
        last = self.messages[-1]
        if not self.echo or last.role != "assistant" or last.content is None:
            return ""
        return last.content if isinstance(last.content, str) else "\n".join(part.text for part in last.content)

    def sampling(self, model: ModelInfo) -> SamplingParams:
        """Return the sampling parameters. Raises GatewayError 400 that names the field."""
        if self.top_logprobs and not self.logprobs:
            raise GatewayError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
        logprobs = self.top_logprobs or 0 if self.logprobs else None
        max_tokens = self.max_completion_tokens or self.max_tokens or model.sampling_defaults.max_tokens
        return sampling_params(self, max_tokens, logprobs, model)


_TEMPLATE_FIELDS = (
    "role", "content", "name", "tool_call_id", "tool_calls", "reasoning_content", "reasoning", "refusal",
)  # fmt: skip


def template_messages(messages: Iterable[ChatMessage]) -> list[dict[str, Any]]:
    """Return messages for `ChatRenderer`, without ignored fields. Raises GatewayError 400 that names the field."""
    for index, message in enumerate(messages):
        for name in ("audio", "function_call"):
            if getattr(message, name):
                where = f"messages[{index}].{name}"
                text = f"{where} is not supported; put its text into content"
                raise GatewayError(400, text, code="unsupported_parameter", param=where)
    return [{name: to_builtins(getattr(message, name)) for name in _TEMPLATE_FIELDS} for message in messages]
