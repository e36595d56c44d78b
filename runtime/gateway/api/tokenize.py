"""/tokenize and /detokenize in vLLM's format: bodies and handlers."""

import functools
from typing import Annotated, Any

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..interfaces import GatewayError
from .body_types import Answer, Body, ModelName, Text, TokenIds
from .chat import MAX_MESSAGES, ChatMessage, template_messages
from .context import GatewayContext, caller_of, errors_as_400, json_response


class TokenizeRequest(Body, frozen=True, kw_only=True):
    """A text, or a conversation for the model's chat template."""

    model: ModelName | None = None
    prompt: Text | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(max_length=64)] | None = None

    def conversation(self) -> list[dict[str, Any]] | None:
        """Return the messages, None for a text. Raises GatewayError 400 unless exactly one of both is given."""
        if (self.prompt is None) == (self.messages is None):
            raise GatewayError(400, "give exactly one of prompt and messages", param="prompt")
        if self.messages is None:
            return None
        return template_messages(self.messages)


class Tokenized(Answer, frozen=True, kw_only=True):
    """The token ids."""

    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeRequest(Body, frozen=True, kw_only=True):
    """Token ids."""

    tokens: TokenIds
    model: ModelName | None = None


class Detokenized(Answer, frozen=True, kw_only=True):
    """The text, with special tokens."""

    prompt: str


async def tokenize(context: GatewayContext, request: Request) -> Response:
    """Return the ids of a text or a conversation. An engine computes them, as for its prompts."""
    headers = context.admission.count(caller_of(request), uses_tokens=False)
    body = await context.read_body(request, TokenizeRequest)
    messages = body.conversation()
    target = await context.target(caller_of(request), body.model)
    text = body.prompt or ""
    if messages is not None:
        text = await context.chat_prompt(
            request,
            await context.templates(target),
            messages,
            body.add_generation_prompt,
            body.continue_final_message,
            body.chat_template_kwargs,
        )
    with errors_as_400("prompt" if messages is None else "messages"):
        # chat templates add special tokens themselves
        special = messages is None if body.add_special_tokens is None else body.add_special_tokens
        ids = await context.in_tokenizing_turn(request, lambda: context.engines.tokenize(text, special))
    return json_response(Tokenized(count=len(ids), max_model_len=target.model.max_model_len, tokens=ids), headers)


async def detokenize(context: GatewayContext, request: Request) -> Response:
    """Return the text of ids."""
    headers = context.admission.count(caller_of(request), uses_tokens=False)
    body = await context.read_body(request, DetokenizeRequest)
    await context.target(caller_of(request), body.model)
    with errors_as_400("tokens"):
        text = await context.in_tokenizing_turn(request, lambda: context.engines.detokenize(body.tokens))
    return json_response(Detokenized(prompt=text), headers)


def routes(context: GatewayContext) -> list[Route]:
    """Return the routes of the endpoints."""
    return [
        Route("/tokenize", functools.partial(tokenize, context), methods=["POST"]),
        Route("/detokenize", functools.partial(detokenize, context), methods=["POST"]),
    ]
