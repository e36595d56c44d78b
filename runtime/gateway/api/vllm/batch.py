"""/v1/chat/completions/batch: several conversations in one request, with one answer each."""

import asyncio
import functools
import time
from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta, structs
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...interfaces import GatewayError
from ..body_types import MAX_PROMPTS
from ..chat.answer import ChatCompletion
from ..chat.endpoint import OpenChat, choices_of, open_chat
from ..chat.request import MAX_MESSAGES, ChatMessage, ChatRequest
from ..completion_session import CompletionResult, CompletionSession, TokenCounts
from ..context import GatewayContext, caller_of, json_response, new_id
from ..request_body import while_connected

_SUMMED = ("output_tokens", "cached_tokens", "draft_tokens", "accepted_tokens")
Conversation = Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]


class BatchChatRequest(ChatRequest, frozen=True, kw_only=True):
    """Conversations with the same options. Without `stream`, `tools`, `prompt_logprobs`, beam search, and several
    answers each.
    """

    messages: Annotated[list[Conversation], Meta(min_length=1, max_length=MAX_PROMPTS)]  # type: ignore[assignment]

    def chats(self) -> list[ChatRequest]:
        """Return the bodies of the single chats. Raises GatewayError 400 that names a field that a batch lacks."""
        for name in ("stream", "tools", "prompt_logprobs", "use_beam_search", "kv_transfer_params"):
            if getattr(self, name) not in (None, False, []):
                raise GatewayError(400, f"{name} does not work in a batch; use /v1/chat/completions", param=name)
        if self.n not in (None, 1):
            raise GatewayError(400, f"n={self.n} must be 1 in a batch; repeat the conversation", param="n")
        options = {name: getattr(self, name) for name in ChatRequest.__struct_fields__}
        return [ChatRequest(**options | {"messages": messages}) for messages in self.messages]


async def batch_chat_completions(context: GatewayContext, request: Request) -> Response:
    """Handle one request. The first error ends all its chats."""
    context.admission.count(caller_of(request), uses_tokens=True)
    body = (await context.read_body(request, BatchChatRequest)).with_tokens_as_ids(context.settings.tokens_as_ids)
    bodies, chats = body.chats(), list[OpenChat]()
    try:
        for each in bodies:
            chats.append(await open_chat(context, request, each))
        results = await while_connected(request.receive, _all_results([chat.session for chat in chats]))
    except BaseException:
        for chat in chats:
            await chat.session.close()
        raise
    choices = [
        structs.replace(choice, index=index)
        for index, (each, chat, result) in enumerate(zip(bodies, chats, results, strict=True))
        for choice in choices_of(each, chat.messages, result)
    ]
    counts = _sum([chat.session.counts for chat in chats])
    answer = ChatCompletion(
        id=new_id("chatcmpl"),
        created=int(time.time()),
        model=chats[0].target.name,
        choices=choices,
        usage=counts.usage(),
        sidestream_receipt=counts.receipt,
    )
    return json_response(answer, chats[-1].session.headers)


async def _all_results(sessions: Sequence[CompletionSession]) -> list[list[CompletionResult]]:
    tasks = [asyncio.create_task(session.results()) for session in sessions]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _sum(counts: Sequence[TokenCounts]) -> TokenCounts:
    """Return the counts of all chats together."""
    sums: dict[str, Any] = {name: sum(getattr(each, name) for each in counts) for name in _SUMMED}
    return TokenCounts(
        {index: each.prompt_tokens for index, each in enumerate(counts)},
        **sums,
        adapter_active=all(each.adapter_active for each in counts),
        reasoning=[parser for each in counts for parser in each.reasoning],
        receipts={index: each.receipts[0] for index, each in enumerate(counts) if each.receipts},
    )


def routes(context: GatewayContext) -> list[Route]:
    """Return the route of the endpoint."""
    endpoint = functools.partial(batch_chat_completions, context)
    return [Route("/v1/chat/completions/batch", endpoint, methods=["POST"])]
