"""/invocations, the path of SageMaker: a chat, or a completion if the body has a prompt."""

import functools

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..chat.endpoint import answer_chat
from ..chat.request import ChatRequest
from ..completions import CompletionRequest, answer_completion
from ..context import GatewayContext, caller_of

_SHAPES: dict[str, type[ChatRequest | CompletionRequest]] = {"messages": ChatRequest, "prompt": CompletionRequest}


async def invocations(context: GatewayContext, request: Request) -> Response:
    """Handle one request."""
    context.admission.count(caller_of(request), uses_tokens=True)
    body = await context.read_body(request, _SHAPES)
    if isinstance(body, ChatRequest):
        return await answer_chat(context, request, body)
    return await answer_completion(context, request, body)


def routes(context: GatewayContext) -> list[Route]:
    """Return the route of the endpoint."""
    return [Route("/invocations", functools.partial(invocations, context), methods=["POST"])]
