"""The response, the items of its output, and its events."""

from typing import Any, Literal

from msgspec import UNSET, UnsetType, field, structs, to_builtins

from ..body_types import Answer, PromptTokensDetails, ReceiptField
from ..completion_session import TokenCounts
from ..logprobs import ChatLogprob
from .request import AllowedTools, ChosenName, ResponseRequest

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(Answer, frozen=True, kw_only=True):
    """The generated text."""

    text: str
    annotations: list[Any] = field(default_factory=list)
    logprobs: list[ChatLogprob] = field(default_factory=list)
    type: Literal["output_text"] = "output_text"


class OutputMessage(Answer, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """A message of the answer."""

    id: str
    status: Status
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class ReasoningText(Answer, frozen=True, kw_only=True):
    """The text of the reasoning."""

    text: str
    type: Literal["reasoning_text"] = "reasoning_text"


class ReasoningItem(Answer, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """The reasoning before the answer, in clear text."""

    id: str
    status: Status
    content: list[ReasoningText]
    summary: list[Any] = field(default_factory=list)
    encrypted_content: None = None


class FunctionCallItem(Answer, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    """A call of a function. `arguments`: JSON text."""

    id: str
    status: Status
    call_id: str
    name: str
    arguments: str


OutputItem = ReasoningItem | OutputMessage | FunctionCallItem


class IncompleteDetails(Answer, frozen=True, kw_only=True):
    """Why the answer is incomplete."""

    reason: Literal["max_output_tokens"]


class InputTokensDetails(PromptTokensDetails, frozen=True, kw_only=True):
    """Prompt tokens that were found in the prefix cache. Writing to it is not counted."""

    cache_write_tokens: Literal[0] = 0


class OutputTokensDetails(Answer, frozen=True, kw_only=True):
    """Parts of the output tokens."""

    reasoning_tokens: int


class ResponseUsage(Answer, frozen=True, kw_only=True):
    """Token counts of the request."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    total_tokens: int
    output_tokens_details: OutputTokensDetails


class ResponseError(Answer, frozen=True, kw_only=True):
    """Why the request failed."""

    code: str
    message: str


class EchoedTool(Answer, frozen=True, kw_only=True):
    """A tool of the request."""

    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None
    type: Literal["function"] = "function"


class EchoedReasoning(Answer, frozen=True, kw_only=True):
    """Options of the reasoning in the request."""

    effort: str | None = None
    summary: str | None = None


class TextFormat(Answer, frozen=True, kw_only=True):
    """The requested format of the text."""

    format: dict[str, Any] = field(default_factory=lambda: {"type": "text"})
    verbosity: str | UnsetType = UNSET


class RawMessage(Answer, frozen=True, kw_only=True):
    """The text of a prompt or of an answer with its markers, and its tokens."""

    message: str
    tokens: list[int]
    type: Literal["raw_message_tokens"] = "raw_message_tokens"


class Response(Answer, frozen=True, kw_only=True):
    """The response. In a stream, also the initial one without output. `input_messages`, `output_messages`: with
    `enable_response_messages`, as in vLLM.
    """

    id: str
    created_at: int
    model: str
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    output: list[OutputItem]
    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    top_logprobs: int
    metadata: dict[str, str]
    parallel_tool_calls: bool
    reasoning: EchoedReasoning
    text: TextFormat
    tool_choice: Any
    tools: list[EchoedTool]
    truncation: str
    usage: ResponseUsage | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    object: Literal["response"] = "response"
    background: bool = False
    previous_response_id: str | None = None
    store: bool = False
    sidestream_receipt: ReceiptField = UNSET
    input_messages: list[RawMessage] | UnsetType = UNSET
    output_messages: list[RawMessage] | UnsetType = UNSET


class ResponseEvent(Answer, frozen=True, kw_only=True):
    """`response.created`, `.in_progress`, `.completed`, `.incomplete` and `.failed`."""

    type: str
    sequence_number: int
    response: Response


def initial_response(
    body: ResponseRequest, answer_id: str, created: int, model: str, temperature: float, top_p: float, store: bool
) -> Response:
    """Return the response without output, with the fields that it repeats of the body. `store`: it is stored."""
    form = None if body.text is None else body.text.format
    choice = body.tool_choice or "auto"
    reasoning = body.reasoning
    return Response(
        id=answer_id,
        created_at=created,
        model=model,
        status="queued" if body.background else "in_progress",
        output=[],
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        temperature=temperature,
        top_p=top_p,
        top_logprobs=body.top_logprobs or 0,
        metadata=body.metadata or {},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning=EchoedReasoning()
        if reasoning is None
        else EchoedReasoning(effort=reasoning.effort, summary=reasoning.summary),
        text=TextFormat(
            format={"type": "text"}
            if form is None
            else {name: value for name, value in structs.asdict(form).items() if value is not None},
            verbosity=(body.text.verbosity if body.text is not None else None) or UNSET,
        ),
        tool_choice=to_builtins(choice) if isinstance(choice, ChosenName | AllowedTools) else choice,
        tools=[
            EchoedTool(name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict)
            for tool in body.tools or ()
        ],
        truncation=body.truncation or "disabled",
        background=bool(body.background),
        previous_response_id=body.previous_response_id,
        store=store,
    )


def final_response(
    initial: Response, output: list[OutputItem], raw: RawMessage, cut_off: bool, counts: TokenCounts
) -> Response:
    """Return the response with its output. `raw`: the answer; `cut_off`: it ended at the limit of its tokens."""
    return structs.replace(
        initial,
        status="incomplete" if cut_off else "completed",
        incomplete_details=IncompleteDetails(reason="max_output_tokens") if cut_off else None,
        output=output,
        output_messages=UNSET if initial.input_messages is UNSET else [raw],
        sidestream_receipt=counts.receipt,
        usage=ResponseUsage(
            input_tokens=counts.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=counts.cached_tokens),
            output_tokens=counts.output_tokens,
            total_tokens=counts.prompt_tokens + counts.output_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=counts.reasoning_tokens),
        ),
    )
