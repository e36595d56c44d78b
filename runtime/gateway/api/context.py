"""State that handlers share: engines, admission, observer, settings. Resolves `model` and applies chat templates."""

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import os
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ...api.adapter_sum import is_sum, sum_name, sum_parts
from ...api.errors import RequestError, some_of
from ...text.chat_files import DEFAULT, ChatTemplates
from ...text.chat_renderer import ChatRenderer
from ...text.reasoning import CLOSER, ReasoningParser, reasoning_start
from ..intake.adapter_resolver import AdapterResolver
from ..intake.body_decoder import BodyDecoder, Shapes
from ..intake.body_memory import BODY, BodyMemory, HeldBody
from ..intake.fair_queue import FairQueue
from ..interfaces import AdapterCard, Admission, Caller, Engines, GatewayError, ModelInfo, Observer
from ..settings import GatewaySettings
from .errors import model_not_found
from .request_body import read_body, while_connected

T = TypeVar("T")
MAX_CACHED_TEMPLATES = 256
"""Cached chat templates of adapters."""
NO_TEMPLATE = (
    "the model has no chat template; use /v1/completions with a prompt, or start the server with --chat-template FILE"
)
_PROBED_ROLES = ("system", "user", "assistant", "system", "user")
"""Chat templates with the system only at the start refuse such messages, or render them without the fourth text."""
NAMES_SECONDS = 1.0
MAX_TEMPLATE_PROCESSES = 4
BODIES_PER_OWNER = 4
"""Bodies of the largest size that an owner may have in memory before its requests are admitted."""
TOKENIZATIONS, TOKENIZATIONS_PER_OWNER = 8, 2
CLOSED = "sidestream.is_closed"
"""Key of a function in a request's scope that returns whether the connection is closed. Absent without one."""
MODEL = "sidestream.model"
"""Key of the name of the adapter or base model in the scope of a request that reached the limits of its key."""
_OWNER_TAG = "sidestream.owner_tag"
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
    """See the module. `numbers` makes names unique within this process; `open_requests` counts sessions."""

    def __init__(self, engines: Engines, admission: Admission, observer: Observer, settings: GatewaySettings) -> None:
        self.engines, self.admission, self.observer, self.settings = engines, admission, observer, settings
        self.numbers, self.open_requests = itertools.count(), 0
        processes = min(MAX_TEMPLATE_PROCESSES, len(os.sched_getaffinity(0)))
        self._renderer = ChatRenderer(processes)
        self._renderings = FairQueue(processes, max(1, processes - 1))
        self._tokenizations = FairQueue(TOKENIZATIONS, TOKENIZATIONS_PER_OWNER)
        self._decoder, self._decodings = BodyDecoder(settings.max_body_bytes), FairQueue(1, 1)
        self._body_memory = BodyMemory(BODIES_PER_OWNER * settings.max_body_bytes)
        self._resolver = AdapterResolver(settings.resolve_roots, engines)
        self._names: tuple[float, list[str]] | None = None
        self._templates: OrderedDict[tuple[str, str], ChatTemplates] = OrderedDict()
        self._accepts_inline_system: OrderedDict[str, bool] = OrderedDict()  # by the text of a chat template
        self._closer: list[int] | None = None  # tokens of </think>

    def close(self) -> None:
        """End the child processes."""
        self._renderer.close()
        self._decoder.close()

    async def read_body(self, request: Request, shape: Shapes[T]) -> T:
        """Return the body decoded as `shape`. Its bytes count for the owner.

        A large body is decoded in the turn of its owner. Raises GatewayError, 404 for the model of a large body.
        """
        held = request.scope[BODY] = HeldBody(self._body_memory, owner_tag(request))

        async def decode_large(data: bytes) -> T:
            check = functools.partial(self._decoder.check, data, shape)
            body = await self._in_thread(self._decodings, request, check)
            await self.target(request, body.model)
            return await body.decode()

        return await read_body(request, shape, self.settings, held, decode_large)

    async def target(
        self,
        request: Request,
        name: str | None,
        lora_path: str | None = None,
        lora_weights: Mapping[str, float] | None = None,
        *,
        may_load: bool = True,
    ) -> Target:
        """Resolve a body's `model`: the base model (also None), an adapter, or MODEL:ADAPTER as in SGLang.

        lora_path     SGLang's field: an adapter if `name` is the base model
        lora_weights  weights of adapters, if `name` is the base model
        may_load      load an unknown adapter from `resolve_roots`

        Raises GatewayError 404 if it does not exist or the caller may not use it.
        """
        model, caller = await self.engines.model(), caller_of(request)
        if lora_weights is not None:
            if lora_path is not None or name not in (None, model.name, *self.settings.model_aliases):
                text = "lora_weights names the adapters; leave lora_path out, and give the base model in model or none"
                raise GatewayError(400, text, param="lora_weights")
            with errors_as_400("lora_weights"):
                name = sum_name(lora_weights.items(), "lora_weights")
            if is_sum(name):
                return Target(model, await self.sum_card(request, name, "lora_weights"))
        name = (lora_path if name in (None, model.name) else None) or name
        card = None
        if name not in (None, model.name, *self.settings.model_aliases):
            adapter = (name or "").removeprefix(f"{model.name}:")
            card = await self.engines.adapter(adapter)
            if card is None and may_load and self.settings.resolve_roots and self.admission.may_use(caller, adapter):
                connected = functools.partial(while_connected, request.receive)
                await self._resolver.resolve(adapter, owner_tag(request), connected)
                card = await self.engines.adapter(adapter)
            if card is None:
                raise await self._unknown_model(caller, model, name or "")
        target = Target(model, card)
        if not self.admission.may_use(caller, target.name):
            raise await self._unknown_model(caller, model, target.name)
        return target

    async def sum_card(self, request: Request, name: str, field: str) -> AdapterCard:
        """Return a sum as an adapter. Raises GatewayError 404 unless the caller may use all its adapters, and 400 that
        names `field` for an adapter that is a sum or the base model.
        """
        rank = 0
        for part, _ in sum_parts(name):
            card = (await self.target(request, part)).adapter
            if card is None or card.is_sum:
                kind = "the base model" if card is None else "a sum; name its adapters and their weights instead"
                raise GatewayError(400, f"{field}: {part!r} is {kind}", param=field)
            rank += card.rank
        return AdapterCard(name, rank, "")

    async def _unknown_model(self, caller: Caller, model: ModelInfo, name: str) -> GatewayError:
        """Return the error, with some of the names that the caller may use; they are up to NAMES_SECONDS old."""
        now = time.monotonic()
        if self._names is None or now - self._names[0] > NAMES_SECONDS:
            self._names = now, [model.name, *(card.name for card in await self.engines.adapters())]
        known = some_of([each for each in self._names[1] if self.admission.may_use(caller, each)])
        return model_not_found(f"the model {name!r} does not exist (there are: {known}); /v1/models lists all")

    async def templates(self, target: Target, chosen: str | None = None) -> ChatTemplates:
        """Return the chat templates of the model, or those of an adapter with its own.

        chosen   the name of one of them, or the text of another, which is then the only one
        """
        found = await self._own_templates(target)
        return ChatTemplates({DEFAULT: found.select(chosen, False)}, found.tokens) if chosen else found

    async def _own_templates(self, target: Target) -> ChatTemplates:
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

    async def accepts_inline_system(self, request: Request, templates: ChatTemplates, has_tools: bool) -> bool:
        """Return whether the chat template renders messages of the system after the first message.

        Raises ClientDisconnect like `chat_prompt`.
        """
        if not templates.templates:
            return False
        with errors_as_400("messages"):
            source = templates.select(None, has_tools)
        known = self._accepts_inline_system
        if source not in known:
            probe = [{"role": role, "content": f"text-{index}"} for index, role in enumerate(_PROBED_ROLES)]
            try:
                prompt = await self.chat_prompt(request, ChatTemplates({DEFAULT: source}, templates.tokens), probe)
                known[source] = "text-3" in prompt or "text-0" not in prompt
            except GatewayError:
                known[source] = False
            if len(known) > MAX_CACHED_TEMPLATES:
                known.popitem(last=False)
        return known[source]

    async def chat_prompt(
        self,
        request: Request,
        templates: ChatTemplates,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> str:
        """Render a conversation with a chat template, in the turn of the request's owner.

        Raises GatewayError 400 that names the field, ClientDisconnect if the client disconnects before its turn.
        """
        if not templates.templates:
            raise GatewayError(400, NO_TEMPLATE, param="messages")
        continues = bool(continue_final_message)
        render = functools.partial(
            self._renderer.prompts,
            templates,
            messages,
            add_generation_prompt=not continues if add_generation_prompt is None else add_generation_prompt,
            continue_final_message=continues,
            chat_template_kwargs={**self.settings.template_variables, **(template_kwargs or {})},
            tools=tools,
        )
        try:
            (prompt,) = await self._in_thread(self._renderings, request, render)
        except RequestError as problem:
            raise GatewayError(400, str(problem), param=getattr(problem, "param", "messages")) from None
        return prompt

    async def reasoning_parsers(
        self, templates: ChatTemplates, has_tools: bool, prompt: str, continued: str, n: int
    ) -> list[ReasoningParser]:
        """Return a parser for each of `n` answers to a rendered prompt. `continued`: see `reasoning_start`."""
        template = templates.select(None, has_tools)
        start = reasoning_start(self.settings.reasoning_parser, template, prompt, continued)
        if start != "none" and self._closer is None:
            self._closer = await self.engines.tokenize(CLOSER, add_special_tokens=False)
        closer_id = self._closer[0] if self._closer is not None and len(self._closer) == 1 else None
        return [ReasoningParser(start, closer_id) for _ in range(n)]

    async def in_tokenizing_turn(self, request: Request, work: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `work`, which calls an engine's tokenizer, in the turn of the request's owner.

        Raises ClientDisconnect if the client disconnects.
        """

        async def run() -> T:
            async with self._tokenizations.turn(owner_tag(request)):
                return await work()

        return await while_connected(request.receive, run())

    async def prompt_ids(self, request: Request, prompt: str | list[int], add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a prompt, which may be a text."""
        if not isinstance(prompt, str):
            return prompt
        return await self.in_tokenizing_turn(request, lambda: self.engines.tokenize(prompt, add_special_tokens))

    async def _in_thread(self, queue: FairQueue, request: Request, work: Callable[[], T]) -> T:
        """Return the result of `work`, which runs in a thread in the turn of the request's owner.

        The turn ends with the thread, even if this is cancelled. Raises ClientDisconnect if the client disconnects
        before it begins.
        """
        owner = owner_tag(request)
        if not queue.try_start(owner):
            await while_connected(request.receive, queue.start(owner))
        if is_closed(request):
            queue.end(owner)
            raise ClientDisconnect
        future = asyncio.get_running_loop().run_in_executor(None, work)
        future.add_done_callback(lambda _: queue.end(owner))
        return await asyncio.shield(future)


def caller_of(request: Request) -> Caller:
    """Return the client that the middleware authenticated."""
    caller: Caller = request.scope["sidestream.caller"]
    return caller


def owner_tag(request: Request) -> str:
    """Return a tag for fair scheduling: of the key's owner, or of the client's address if there are no keys.

    Engines need no names, so the tag is a hash. It is the same in all gateways.
    """
    tag: str | None = request.scope.get(_OWNER_TAG)
    if tag is None:
        caller = caller_of(request)
        host = request.client.host if request.client is not None else ""
        name = caller.owner if caller.key_id else f"{caller.owner}\n{host}"
        tag = request.scope[_OWNER_TAG] = blake2b(name.encode(), digest_size=8).hexdigest()
    return tag


def is_closed(request: Request) -> bool:
    """Return whether the connection of the request is known to be closed."""
    closed: Callable[[], bool] | None = request.scope.get(CLOSED)
    return closed is not None and closed()


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
def renamed_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Give errors in this block about a field of a chat the name of the field that set it.

    names   field of a chat -> field of the body. An entry of a list is named by its list.
    """
    try:
        yield
    except GatewayError as problem:
        name, message = (problem.param or "").partition("[")[0], problem.message
        if name in names:
            message = message.replace(problem.param or name, names[name], 1)
        for other in names:
            if "_" in other:  # a field, and no word of the sentence
                message = re.sub(rf"\b{other}\b", names[other], message)
        raise dataclasses.replace(problem, message=message, param=names.get(name, problem.param)) from None


@contextlib.contextmanager
def errors_as_400(field: str) -> Iterator[None]:
    """Convert RequestError in this block to GatewayError 400 about `field`."""
    try:
        yield
    except RequestError as problem:
        raise GatewayError(400, str(problem), param=field) from None
