"""What all handlers share: engines, admission, observer; who asks, and for which model."""

import asyncio
import contextlib
import itertools
import secrets
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...api.errors import RequestError
from ...text.chat_files import ChatTemplates
from ...text.chat_renderer import ChatRenderer
from ..contracts import AdapterCard, Admission, Caller, Engines, GatewayError, ModelInfo, Observer
from ..settings import GatewaySettings

KEPT_TEMPLATES = 256
"""Adapters' chat templates that are remembered."""
NO_TEMPLATE = (
    "the model has no chat template; use /v1/completions with a prompt, or start the server with --chat-template FILE"
)
_encoder = msgspec.json.Encoder()


@dataclass(frozen=True)
class Target:
    """What a request's `model` means: the base, or an adapter of it."""

    model: ModelInfo
    adapter: AdapterCard | None

    @property
    def name(self) -> str:
        """As the caller named it, or would have."""
        return self.model.name if self.adapter is None else self.adapter.name


class Desk:
    """See the module. `numbers` are for what has to differ within this process; `close` ends what was started."""

    def __init__(self, engines: Engines, admission: Admission, observer: Observer, settings: GatewaySettings) -> None:
        self.engines, self.admission, self.observer, self.settings = engines, admission, observer, settings
        self.numbers = itertools.count()
        self._renderer = ChatRenderer()
        self._templates: OrderedDict[tuple[str, str], ChatTemplates] = OrderedDict()

    def close(self) -> None:
        """End the chat template's process."""
        self._renderer.close()

    async def target(self, caller: Caller, name: str | None) -> Target:
        """What `name` means to the caller; None is the base model.

        Raises GatewayError 404, also for what the caller may not use.
        """
        model = await self.engines.model()
        if name is None or name == model.name:
            found = Target(model, None)
        else:
            card = await self.engines.adapter(name)
            if card is None:
                raise no_model(name)
            found = Target(model, card)
        if not self.admission.may_use(caller, found.name):
            raise no_model(found.name)
        return found

    async def templates(self, target: Target) -> ChatTemplates:
        """The chat templates of the model, or of an adapter that has its own."""
        base, card = target.model.templates, target.adapter
        if card is None or card.chat_template == "":
            return base
        if card.chat_template is None:  # no engine has read it
            return (await self.engines.chat_templates(card.name)).over(base)
        key = card.name, card.chat_template
        if key not in self._templates:
            self._templates[key] = await self.engines.chat_templates(card.name)
            if len(self._templates) > KEPT_TEMPLATES:
                self._templates.popitem(last=False)
        self._templates.move_to_end(key)
        return self._templates[key].over(base)

    async def chat_prompt(
        self,
        templates: ChatTemplates,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> str:
        """The prompt that a chat template makes of a conversation. Raises GatewayError 400 that names the field."""
        if not templates.templates:
            raise GatewayError(400, NO_TEMPLATE, param="messages")
        goes_on = bool(continue_final_message)
        try:
            (prompt,) = await asyncio.to_thread(
                self._renderer.prompts,
                templates,
                messages,
                add_generation_prompt=not goes_on if add_generation_prompt is None else add_generation_prompt,
                continue_final_message=goes_on,
                chat_template_kwargs=template_kwargs,
                tools=tools,
            )
        except RequestError as problem:
            raise GatewayError(400, str(problem), param=getattr(problem, "param", "messages")) from None
        return prompt


def no_model(name: str) -> GatewayError:
    """There is no such model, or it is nobody's business that there is."""
    return GatewayError(
        404, f"the model {name!r} does not exist; /v1/models lists all", code="model_not_found", param="model"
    )


def caller_of(request: Request) -> Caller:
    """Who asks, as the guard found out."""
    caller: Caller = request.scope["sidestream.caller"]
    return caller


def admin_only(caller: Caller) -> None:
    """Raises GatewayError 403."""
    if not caller.admin:
        raise GatewayError(403, "this needs an admin's key", "permission_error", "admin_only")


def request_id_of(request: Request) -> str:
    """The id that the guard gave the request."""
    request_id: str = request.scope["sidestream.request_id"]
    return request_id


def new_id(kind: str) -> str:
    """An id that no other answer has, such as `chatcmpl-...`."""
    return f"{kind}-{secrets.token_hex(16)}"


def json_response(body: object, headers: Mapping[str, str] | None = None) -> Response:
    """A struct as an answer."""
    return Response(_encoder.encode(body), 200, headers, "application/json")


@contextlib.contextmanager
def field(name: str) -> Any:
    """Errors of the engine in this block are about this field."""
    try:
        yield
    except RequestError as problem:
        raise GatewayError(400, str(problem), param=name) from None
