"""/tokenize and /detokenize."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..shapes.tokens import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest
from .bodies import read_body, while_connected
from .desk import Desk, caller_of, field, json_response


class Tokens:
    """The endpoints' handlers: an engine does the work, so that the ids are those of its prompts."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def tokenize(self, request: Request) -> Response:
        """The ids of a text or a conversation."""
        desk = self._desk
        body = await read_body(request, TokenizeRequest, desk.settings)
        messages = body.conversation()
        target = await desk.target(caller_of(request), body.model)
        counted = desk.admission.count(caller_of(request))
        text = body.prompt or ""
        if messages is not None:
            text = await desk.chat_prompt(
                await desk.templates(target),
                messages,
                body.add_generation_prompt,
                body.continue_final_message,
                body.chat_template_kwargs,
            )
        with field("prompt" if messages is None else "messages"):
            # a chat template has put in those that it wants
            special = messages is None if body.add_special_tokens is None else body.add_special_tokens
            ids = await while_connected(request.receive, desk.engines.tokenize(text, special))
        return json_response(Tokenized(count=len(ids), max_model_len=target.model.max_model_len, tokens=ids), counted)

    async def detokenize(self, request: Request) -> Response:
        """The text of ids."""
        body = await read_body(request, DetokenizeRequest, self._desk.settings)
        await self._desk.target(caller_of(request), body.model)
        counted = self._desk.admission.count(caller_of(request))
        with field("tokens"):
            text = await while_connected(request.receive, self._desk.engines.detokenize(body.tokens))
        return json_response(Detokenized(prompt=text), counted)


def routes(desk: Desk) -> list[Route]:
    """The endpoints."""
    tokens = Tokens(desk)
    return [
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
    ]
