"""/tokenize, /detokenize and /tokenizer_info in vLLM's format: bodies and handlers."""

import functools
from typing import Annotated, Any

from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ....text.chat_files import DEFAULT
from ...interfaces import GatewayError
from ..body_types import Answer, Body, ModelName, TemplateText, TemplateVariables, Text, TokenIds
from ..chat.request import MAX_MESSAGES, ChatMessage, template_messages
from ..context import GatewayContext, caller_of, errors_as_400, json_response
from ..tools import Tools, for_template, offered_tools


class TokenizeRequest(Body, frozen=True, kw_only=True):
    """A text, or a conversation for the model's chat template."""

    model: ModelName | None = None
    prompt: Text | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: TemplateText | None = None
    chat_template_kwargs: TemplateVariables | None = None
    tools: Tools | None = None
    return_token_strs: bool | None = None

    def conversation(self) -> list[dict[str, Any]] | None:
        """Return the messages, None for a text. Raises GatewayError 400 unless exactly one of both is given."""
        if (self.prompt is None) == (self.messages is None):
            raise GatewayError(400, "give exactly one of prompt and messages", param="prompt")
        if self.messages is None:
            if self.tools:
                raise GatewayError(400, "tools needs messages; a text has none", param="tools")
            return None
        return template_messages(self.messages)


class Tokenized(Answer, frozen=True, kw_only=True):
    """The token ids. `token_strs`: their spelling in the vocabulary, with `return_token_strs`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class TokenizerInfo(Answer, frozen=True, kw_only=True):
    """Fields of a tokenizer_config.json, without paths. `chat_template`: the one without tools."""

    tokenizer_class: str
    model_max_length: int
    chat_template: str | None
    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    unk_token: str | None = None


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
    target = await context.target(request, body.model)
    text = body.prompt or ""
    if messages is not None:
        text = await context.chat_prompt(
            request,
            await context.templates(target, body.chat_template),
            messages,
            body.add_generation_prompt,
            body.continue_final_message,
            body.chat_template_kwargs,
            for_template(offered_tools(body.tools, None)) if body.tools else None,
        )
    with errors_as_400("prompt" if messages is None else "messages"):
        # chat templates add special tokens themselves
        special = messages is None if body.add_special_tokens is None else body.add_special_tokens
        strings: list[str] | UnsetType = UNSET
        if body.return_token_strs:
            tokens = await context.in_tokenizing_turn(request, lambda: context.engines.token_spellings(text, special))
            ids, strings = [token for token, _ in tokens], [spelling for _, spelling in tokens]
        else:
            ids = await context.in_tokenizing_turn(request, lambda: context.engines.tokenize(text, special))
    length = target.model.max_model_len
    return json_response(Tokenized(count=len(ids), max_model_len=length, tokens=ids, token_strs=strings), headers)


async def detokenize(context: GatewayContext, request: Request) -> Response:
    """Return the text of ids."""
    headers = context.admission.count(caller_of(request), uses_tokens=False)
    body = await context.read_body(request, DetokenizeRequest)
    await context.target(request, body.model)
    with errors_as_400("tokens"):
        text = await context.in_tokenizing_turn(request, lambda: context.engines.detokenize(body.tokens))
    return json_response(Detokenized(prompt=text), headers)


async def tokenizer_info(context: GatewayContext, request: Request) -> Response:
    """Return the base model's special tokens and chat template, with which clients can render prompts."""
    model = (await context.target(request, None)).model
    if not model.has_tokenizer:
        raise GatewayError(404, "the model has no tokenizer; send token ids as prompts")
    tokens = {name: model.templates.tokens.get(f"{name}_token") or None for name in ("bos", "eos", "pad", "unk")}
    info = TokenizerInfo(
        tokenizer_class="PreTrainedTokenizerFast",
        model_max_length=model.max_model_len,
        chat_template=model.templates.templates.get(DEFAULT),
        **{f"{name}_token": text for name, text in tokens.items()},
    )
    return json_response(info)


def routes(context: GatewayContext) -> list[Route]:
    """Return the routes of the endpoints."""
    return [
        Route("/tokenize", functools.partial(tokenize, context), methods=["POST"]),
        Route("/tokenizer_info", functools.partial(tokenizer_info, context), methods=["GET"]),
        Route("/detokenize", functools.partial(detokenize, context), methods=["POST"]),
    ]
