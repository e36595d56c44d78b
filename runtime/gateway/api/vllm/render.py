"""/render below completions, chats, responses and messages: the tokens of their prompts, without generating."""

import functools
from dataclasses import asdict
from typing import Any

from msgspec import UNSET, UnsetType, structs
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ....api.sampling_params import SamplingParams
from ...interfaces import GatewayError
from ..anthropic.messages import MessagesRequest, chat_of
from ..body_types import Answer, StreamOptions
from ..chat.endpoint import render_chat
from ..chat.request import ChatRequest
from ..completion_session import Prompt
from ..completions import CompletionRequest
from ..context import GatewayContext, Target, caller_of, json_response, request_id_of
from ..responses.request import ResponseRequest
from ..responses.store import ResponseStore


class RenderedPrompt(Answer, frozen=True, kw_only=True):
    """A prompt as token ids, with the sampling parameters that have a value. `token_offsets`: with
    `return_token_offsets` the range of each token's characters in a text; (0, 0) for added special tokens.
    """

    request_id: str
    model: str
    token_ids: list[int]
    token_offsets: list[tuple[int, int]] | None = None
    sampling_params: dict[str, Any]
    stream: bool = False
    stream_options: StreamOptions | UnsetType = UNSET


async def _rendered(
    context: GatewayContext,
    request: Request,
    body: CompletionRequest | ChatRequest,
    target: Target,
    request_id: str,
    prompt: Prompt,
    special: bool,
    params: SamplingParams,
) -> RenderedPrompt:
    """Return a prompt with its tokens. `special`: add the special tokens of a text. Raises GatewayError 400."""
    if body.use_beam_search:
        text = "use_beam_search does not work with /render; leave it out, since the prompt is the same"
        raise GatewayError(400, text, param="use_beam_search")
    offsets: list[tuple[int, int]] | None = None
    limits = target.model.max_model_len, params.max_tokens
    if body.return_token_offsets and isinstance(prompt, str):
        offsets_of = functools.partial(context.engines.token_offsets, prompt, special)
        tokens = body.truncated(await context.in_tokenizing_turn(request, offsets_of), *limits)
        ids, offsets = [token for token, _ in tokens], [offset for _, offset in tokens]
    else:
        ids = body.truncated(await context.prompt_ids(request, prompt, special), *limits)
    return RenderedPrompt(
        request_id=request_id,
        model=target.name,
        token_ids=ids,
        token_offsets=offsets,
        sampling_params={name: value for name, value in asdict(params).items() if value is not None},
        stream=bool(body.stream),
        stream_options=body.stream_options or UNSET,
    )


def _request_id(request: Request, prefix: str, given: Any) -> str:
    """Return the id of the header X-Request-Id, else that of the body, else a new one."""
    has_header = "x-request-id" in request.headers or not isinstance(given, str)
    return prefix + (request_id_of(request) if has_header else given)


async def render_completion(context: GatewayContext, request: Request) -> Response:
    """Render the prompts of a completion, in a list."""
    headers = context.admission.count(caller_of(request), uses_tokens=False)
    body = await context.read_body(request, CompletionRequest)
    target = await context.target(request, body.model, body.lora_path, body.lora_weights)
    params, prompts = body.sampling(target.model), body.prompts()
    request_id, rendered = _request_id(request, "cmpl-", getattr(body, "request_id", None)), []
    for index, prompt in enumerate(prompts):
        each_id = request_id if len(prompts) == 1 else f"{request_id}-{index}"
        special = body.add_special_tokens is not False
        rendered.append(await _rendered(context, request, body, target, each_id, prompt, special, params))
    return json_response(rendered, headers)


async def render_conversation(
    prefix: str, shape: type[ChatRequest] | type[ResponseRequest] | type[MessagesRequest],
    context: GatewayContext, request: Request,
) -> Response:  # fmt: skip
    """Render the prompt of a chat, a response or a message. `prefix`: of request ids; `shape`: of the body."""
    headers = context.admission.count(caller_of(request), uses_tokens=False)
    given: ChatRequest | ResponseRequest | MessagesRequest = await context.read_body(request, shape)
    if isinstance(given, ResponseRequest):
        none = ResponseStore(0)  # a prompt does not depend on this gateway's state
        none.stores(given)
        body = given.as_chat(none.conversation("", given))
    else:
        body = given if isinstance(given, ChatRequest) else await chat_of(context, request, given)
    target = await context.target(request, body.model, body.lora_path, body.lora_weights)
    as_text = structs.replace(body, return_token_ids=None, truncate_prompt_tokens=None)
    chat = await render_chat(context, request, as_text, target, body.sampling(target.model), body.conversation())
    request_id = _request_id(request, prefix, getattr(given, "request_id", None))
    special = bool(body.add_special_tokens)
    rendered = await _rendered(context, request, body, target, request_id, chat.prompt, special, chat.params)
    return json_response(rendered, headers)


def routes(context: GatewayContext) -> list[Route]:
    """Return the routes of the endpoints."""
    conversations: tuple[tuple[str, str, Any], ...] = (
        ("/v1/chat/completions/render", "chatcmpl-", ChatRequest),
        ("/v1/responses/render", "resp_", ResponseRequest),
        ("/v1/messages/render", "msg_", MessagesRequest),
    )
    return [
        Route("/v1/completions/render", functools.partial(render_completion, context), methods=["POST"]),
        *(
            Route(path, functools.partial(render_conversation, prefix, shape, context), methods=["POST"])
            for path, prefix, shape in conversations
        ),
    ]
