"""State that handlers share: engines, admission, observer, settings. Resolves `model` and applies chat templates."""

import asyncio
import contextlib
import itertools
import secrets
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...api.errors import RequestError
from ...text.chat_files import ChatTemplates
from ...text.chat_renderer import ChatRenderer
from ..interfaces import AdapterCard, Admission, Caller, Engines, GatewayError, ModelInfo, Observer
from ..settings import GatewaySettings
from .errors import model_not_found

MAX_CACHED_TEMPLATES = 256
"""Cached chat templates of adapters."""
NO_TEMPLATE = (
    "the model has no chat template; use /v1/completions with a prompt, or start the server with --chat-template FILE"
)
_encoder = msgspec.json.Encoder()


@dataclass(frozen=True)
class Target:
    """The base model, or one of its adapters."""

    model: ModelInfo
    adapter: AdapterCard | None

    @property
    def name(self) -> str:
        """Name of the adapter, or of the base model."""
        return self.model.name if self.adapter is None else self.adapter.name


class GatewayContext:
    """See the module. `numbers` makes names unique within this process."""

    def __init__(self, engines: Engines, admission: Admission, observer: Observer, settings: GatewaySettings) -> None:
        self.engines, self.admission, self.observer, self.settings = engines, admission, observer, settings
        self.numbers = itertools.count()
        self._renderer = ChatRenderer()
        self._templates: OrderedDict[tuple[str, str], ChatTemplates] = OrderedDict()

    def close(self) -> None:
        """End the chat template process."""
        self._renderer.close()

    async def target(self, caller: Caller, name: str | None) -> Target:
        """Resolve a body's `model`; None is the base model.

        Raises GatewayError 404 if it does not exist or the caller may not use it.
        """
        model = await self.engines.model()
        card = None
        if name is not None and name != model.name:
            card = await self.engines.adapter(name)
            if card is None:
                raise _unknown_model(name)
        target = Target(model, card)
        if not self.admission.may_use(caller, target.name):
            raise _unknown_model(target.name)
        return target

    async def templates(self, target: Target) -> ChatTemplates:
        """Return the chat templates of the model, or those of an adapter with its own."""
        base, card = target.model.templates, target.adapter
        if card is None or card.chat_template == "":
            return base
        if card.chat_template is None:  # no engine has read them yet
            return (await self.engines.chat_templates(card.name)).over(base)
        key = card.name, card.chat_template
        if key not in self._templates:
            self._templates[key] = await self.engines.chat_templates(card.name)
            if len(self._templates) > MAX_CACHED_TEMPLATES:
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
        """Render a conversation with a chat template. Raises GatewayError 400 that names the field."""
        if not templates.templates:
            raise GatewayError(400, NO_TEMPLATE, param="messages")
        continues = bool(continue_final_message)
        try:
            (prompt,) = await asyncio.to_thread(
                self._renderer.prompts,
                templates,
                messages,
                add_generation_prompt=not continues if add_generation_prompt is None else add_generation_prompt,
                continue_final_message=continues,
                chat_template_kwargs=template_kwargs,
                tools=tools,
            )
        except RequestError as problem:
            raise GatewayError(400, str(problem), param=getattr(problem, "param", "messages")) from None
        return prompt


def _unknown_model(name: str) -> GatewayError:
    return model_not_found(f"the model {name!r} does not exist; /v1/models lists all")


def caller_of(request: Request) -> Caller:
    """Return the client that the middleware authenticated."""
    caller: Caller = request.scope["sidestream.caller"]
    return caller


def admin_only(caller: Caller) -> None:
    """Raise GatewayError 403 unless the caller is an admin."""
    if not caller.admin:
        raise GatewayError(403, "this needs an admin key", "permission_error", "admin_only")


def request_id_of(request: Request) -> str:
    """Return the request id that the middleware set."""
    request_id: str = request.scope["sidestream.request_id"]
    return request_id


def new_id(kind: str) -> str:
    """Return a unique id such as `chatcmpl-...`."""
    return f"{kind}-{secrets.token_hex(16)}"


def json_response(body: object, headers: Mapping[str, str] | None = None) -> Response:
    """Return a 200 response with a struct as JSON."""
    return Response(_encoder.encode(body), 200, headers, "application/json")


@contextlib.contextmanager
def errors_as_400(field: str) -> Iterator[None]:
    """Convert RequestError in this block to GatewayError 400 about `field`."""
    try:
        yield
    except RequestError as problem:
        raise GatewayError(400, str(problem), param=field) from None
