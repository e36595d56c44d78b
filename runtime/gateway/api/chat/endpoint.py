"""Handlers of /v1/chat/completions, and events of a stream."""

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from msgspec import UNSET, structs
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ....api.sampling_params import SamplingParams
from ....api.structured_outputs import StructuredOutputsParams
from ....protocol.messages import Chunk
from ....text.reasoning import ANY_ANSWER, ReasoningParser, has_reasoning
from ...interfaces import GatewayError
from ..beam_search import beam_search_params
from ..completion_session import (
    CompletionResult,
    CompletionSession,
    Prompt,
    estimated_tokens,
    open_session,
    reserved_tokens,
)
from ..context import GatewayContext, Target, caller_of, errors_as_400, json_response, new_id
from ..event_stream import ChunkEncoder, EventStream, TextChunkEncoder
from ..logprobs import ChatLogprobs, TokenLogprobs, chat_logprobs, prompt_logprobs
from ..tool_call_parser import AnswerParser
from ..tools import (
    ToolFormat,
    for_template,
    format_of,
)
from .answer import AnswerMessage, AssistantMessage, ChatChoice, ChatChunkChoice, ChatCompletion, ChatDelta
from .request import ChatRequest

TAIL_TOKENS = 32
"""Last tokens of a given prompt that may end with a marker of reasoning."""


@dataclass(frozen=True)
class RenderedChat:
    """A prompt, as text or with `needs_prompt_ids` as tokens. `params`: with constraints of tools and reasoning;
    `reasoning`: parsers, one per answer.
    """

    prompt: Prompt
    params: SamplingParams
    reasoning: list[ReasoningParser]
    tool_format: ToolFormat | None


async def render_chat(
    context: GatewayContext,
    request: Request,
    body: ChatRequest,
    target: Target,
    params: SamplingParams,
    conversation: list[dict[str, Any]],
) -> RenderedChat:
    """Apply the chat template. `params`, `conversation`: those of the body. Raises GatewayError."""
    tools, tool_format = body.offered_tools, None
    templates = await context.templates(target, body.chat_template)
    if tools:
        with errors_as_400("tools"):
            template = templates.select(None, True) if templates.templates else ""
        tool_format = format_of(template)
        params = body.with_tools(params, tool_format, has_reasoning(context.settings.reasoning_parser, template))
    given = body.given_ids
    if given is not None:
        if (highest := max(given)) >= target.model.vocabulary:
            name = "kv_transfer_params.prompt_token_ids"
            text = f"{name} names token {highest}, which is outside the model's vocabulary of {target.model.vocabulary}"
            raise GatewayError(400, text, param=name)
        tail = functools.partial(context.engines.detokenize, given[-TAIL_TOKENS:])
        text = await context.in_tokenizing_turn(request, tail)  # it shows whether the answer begins in the reasoning
    else:
        text = await context.chat_prompt(
            request,
            templates,
            conversation,
            body.add_generation_prompt,
            body.continue_final_message,
            body.template_variables,
            for_template(tools) if tools else None,
        )
    parsers = await context.reasoning_parsers(templates, bool(tools), text, body.continued_text(), params.n)
    constraint, start, budget = params.structured_outputs, parsers[0].start, body.thinking_token_budget
    limit = None if budget == -1 or start == "none" else budget
    if constraint is None and limit is not None:
        constraint = StructuredOutputsParams(grammar=ANY_ANSWER)
    if isinstance(constraint, StructuredOutputsParams):
        constraint = replace(constraint, reasoning=start, reasoning_tokens=limit)
        params = replace(params, structured_outputs=constraint)
    prompt: Prompt = given or text
    if body.needs_prompt_ids:
        ids = await context.prompt_ids(request, prompt, bool(body.add_special_tokens))
        prompt = body.truncated(ids, target.model.max_model_len, params.max_tokens)
    return RenderedChat(prompt, params, parsers, tool_format)


@dataclass(frozen=True)
class OpenChat:
    """An admitted chat with its rendered prompt.

    messages     one per answer
    prompt_ids   tokens of the prompt with `return_token_ids`, else None
    """

    target: Target
    session: CompletionSession
    messages: list[AssistantMessage]
    prompt_ids: list[int] | None


async def open_chat(context: GatewayContext, request: Request, body: ChatRequest) -> OpenChat:
    """Admit a counted request, render its prompt and open its session. Raises GatewayError."""
    target = await context.target(request, body.model, body.lora_path, body.lora_weights)
    params, conversation, tools = body.sampling(target.model), body.conversation(), body.offered_tools
    estimate = estimated_tokens(body.given_ids or [conversation, for_template(tools) if tools else None])
    beams = beam_search_params(body, params, target.model)
    with reserved_tokens(context, request, target, estimate, params, body.num_choices) as ticket:
        rendered = await render_chat(context, request, body, target, params, conversation)
        session = open_session(
            context,
            request,
            ticket,
            target,
            [rendered.prompt],
            rendered.params,
            bool(body.stream),
            body.priority,
            body.deadline_seconds,
            add_special_tokens=bool(body.add_special_tokens),
        )
    session.constraint_field, session.beams = body.constraint_field, beams
    session.counts.reasoning = parsers = rendered.reasoning
    names, include_reasoning = [tool.function.name for tool in tools], body.include_reasoning is not False
    messages = [
        AssistantMessage(AnswerParser(each, rendered.tool_format, names), include_reasoning) for each in parsers
    ]
    ids = rendered.prompt if body.return_token_ids and isinstance(rendered.prompt, list) else None
    return OpenChat(target, session, messages, ids)


def choices_of(
    body: ChatRequest, messages: Sequence[AssistantMessage], results: Sequence[CompletionResult]
) -> list[ChatChoice]:
    """Return the choices of the response."""
    return [
        ChatChoice(
            index=index,
            message=_with_echo(body.echoed, message.message(result.text, result.token_ids)),
            logprobs=_logprobs(body, result.logprobs) if body.logprobs else None,
            finish_reason=message.finish_reason(result.finish_reason),
            stop_reason=result.stop_reason,
            token_ids=result.token_ids if body.return_token_ids else None,
        )
        for index, (message, result) in enumerate(zip(messages, results, strict=True))
    ]


async def chat_completions(context: GatewayContext, request: Request) -> Response:
    """Handle one request."""
    context.admission.count(caller_of(request), uses_tokens=True)
    return await answer_chat(context, request, await context.read_body(request, ChatRequest))


async def answer_chat(context: GatewayContext, request: Request, given: ChatRequest) -> Response:
    """Answer a counted request."""
    body = given.with_tokens_as_ids(context.settings.tokens_as_ids)
    chat = await open_chat(context, request, body)
    session, messages, prompt_ids = chat.session, chat.messages, chat.prompt_ids
    answer_id, created = new_id("chatcmpl"), int(time.time())
    if body.stream:
        encoder = ChunkEncoder(
            "chat.completion.chunk",
            answer_id,
            created,
            chat.target.name,
            body.stream_options,
            context.settings.force_usage,
        )
        formatter = _ChatFormatter(encoder, body, messages, prompt_ids)
        return EventStream(session, encoder.with_usage(formatter, session.counts), receipts=True)
    results = await session.results(request.receive)
    choices = choices_of(body, messages, results)
    answer = ChatCompletion(
        id=answer_id,
        created=created,
        model=chat.target.name,
        usage=session.counts.usage(),  # after the messages, which count their reasoning
        prompt_logprobs=None
        if body.prompt_logprobs is None
        else prompt_logprobs(results[0].prompt_logprobs, body.prompt_logprobs),
        prompt_token_ids=prompt_ids,
        metrics=session.counts.metrics,
        sidestream_receipt=session.counts.receipt,
        choices=choices,
    )
    return json_response(answer, session.headers)


def _with_echo(echoed: str, message: AnswerMessage) -> AnswerMessage:
    return structs.replace(message, content=echoed + (message.content or "")) if echoed else message


def _logprobs(body: ChatRequest, logprobs: TokenLogprobs) -> ChatLogprobs:
    return chat_logprobs(logprobs, body.shown(body.top_logprobs or 0), bool(body.return_tokens_as_token_ids))


class _ChatFormatter:
    """Formats the events of one request. The first events send the role of each answer.

    messages     one per answer
    prompt_ids   tokens of the prompt with `return_token_ids`, else None
    """

    def __init__(
        self,
        encoder: ChunkEncoder,
        body: ChatRequest,
        messages: list[AssistantMessage],
        prompt_ids: list[int] | None,
    ) -> None:
        self.format_end, self.format_error = encoder.format_end, encoder.format_error
        self._encoder, self._body, self._messages = encoder, body, messages
        self._returns_ids = prompt_ids is not None
        deltas = [ChatDelta(role="assistant", content="")] + ([ChatDelta(content=body.echoed)] if body.echoed else [])
        self._first_events = [
            encoder.event(ChatChunkChoice(index=index, delta=delta), None if index or place else prompt_ids)
            for index in range(len(messages))
            for place, delta in enumerate(deltas)
        ]
        self._text_encoders = [_text_encoder(encoder, index) for index in range(len(messages))]

    def format(self, prompt_index: int, chunks: Sequence[Chunk]) -> list[bytes]:
        events, self._first_events = self._first_events, []
        for chunk in chunks:
            message = self._messages[chunk.index]
            fast = message.is_plain_text and not self._returns_ids
            if fast and chunk.text and not chunk.logprobs and chunk.finish_reason is None:
                events.append(self._text_encoders[chunk.index].event(chunk.text))
                continue
            logprobs = _logprobs(self._body, chunk.logprobs) if chunk.logprobs else None
            delta = message.delta(chunk.text, chunk.finish_reason is not None, chunk.token_ids)
            has_tokens = self._returns_ids and bool(chunk.token_ids)
            if delta is None and logprobs is None and chunk.finish_reason is None and not has_tokens:
                continue
            choice = ChatChunkChoice(
                index=chunk.index,
                delta=delta or ChatDelta(),
                logprobs=logprobs,
                finish_reason=message.finish_reason(chunk.finish_reason),
                stop_reason=UNSET if chunk.stop_reason is None else chunk.stop_reason,
                token_ids=chunk.token_ids if self._returns_ids else UNSET,
            )
            events.append(self._encoder.event(choice))
        return events


def _text_encoder(encoder: ChunkEncoder, index: int) -> TextChunkEncoder:
    return TextChunkEncoder(encoder, lambda text: ChatChunkChoice(index=index, delta=ChatDelta(content=text)))


def routes(context: GatewayContext) -> list[Route]:
    """Return the route of the endpoint."""
    endpoint = functools.partial(chat_completions, context)
    return [Route("/v1/chat/completions", endpoint, methods=["POST"])]
