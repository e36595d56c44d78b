"""/v1/models; loading and unloading of adapters at vLLM's paths and at SGLang's: bodies and handlers.

vLLM's paths have vLLM's statuses. A path outside the roots for adapters gets 403 whether it exists or not.
"""

import functools
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...api.adapter_sum import SUM_PATH, sum_name
from ...api.adapter_update import INFLIGHT
from ...api.errors import RequestError, ServerError
from ..intake.update_body import declared_bytes, update_parts
from ..interfaces import AdapterCard, AdapterUpload, Caller, GatewayError, ModelInfo
from .body_types import AdapterName, Answer, Body, Ignored, LoraWeights
from .context import GatewayContext, admin_only, caller_of, errors_as_400, json_response
from .errors import to_gateway_error
from .event_stream import encode
from .request_body import read_body

Change = Callable[[GatewayContext, Request], Awaitable[str]]
_VLLM_STATUSES = {
    "adapter_not_found": (404, "NotFoundError"),
    "model_not_found": (404, "NotFoundError"),
}
"""Code of an error -> vLLM's status and type."""
ANTHROPIC_VERSION = "anthropic-version"
"""Header of Anthropic's clients."""


class ModelCard(Answer, frozen=True, kw_only=True):
    """The base model, or an adapter, with the base model as `parent`.

    root      name; for an admin, the path of an adapter that was loaded over HTTP or by a client
    content   hash of the adapter's config and weights
    places    engine -> `gpu`, `cpu`, `disk` or `loading`
    """

    id: str
    created: int
    object: Literal["model"] = "model"
    owned_by: str = "sidestream"
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None
    rank: int | None = None
    content: str | None = None
    places: dict[str, str] | None = None


class ModelList(Answer, frozen=True, kw_only=True):
    """The base model, and the adapters that the caller may use."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class AnthropicModel(Answer, frozen=True, kw_only=True):
    """The base model, or an adapter, in Anthropic's format."""

    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: datetime
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int
    max_tokens: int


class AnthropicModelList(Answer, frozen=True, kw_only=True):
    """The same for a request with the header `anthropic-version`. All models are on one page."""

    data: list[AnthropicModel]
    first_id: str | None
    last_id: str | None
    has_more: Literal[False] = False


class LoadAdapter(Body, frozen=True, kw_only=True):
    """Loads a PEFT adapter from a directory on the engines' machines as `lora_name`, or names a sum of adapters.

    Exactly one of `lora_path` and `lora_sum` is given.
    """

    lora_name: AdapterName
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096, pattern=r"^[^\x00]*$")] | None = None
    lora_sum: LoraWeights | None = None
    load_inplace: Annotated[bool, Meta(description="replace an adapter of the same name")] | None = None
    base_model_name: Ignored = None
    lora_id: Ignored = None
    pinned: Ignored = None


class UnloadAdapter(Body, frozen=True, kw_only=True):
    """Unloads an adapter."""

    lora_name: AdapterName
    lora_int_id: Ignored = None
    lora_id: Ignored = None


class AdaptersChanged(Answer, frozen=True, kw_only=True):
    """SGLang's answer to a change. `loaded_adapters`: name -> path, "" if an engine was started with it."""

    success: bool
    error_message: str | None = None
    loaded_adapters: dict[str, str]


class AdapterUpdated(Answer, frozen=True, kw_only=True):
    """An applied update. `content`: hash of config and tensors; `engines`: number of engines that have it; `failed`:
    engine -> why it kept the former version. Requests go to the others.
    """

    name: str
    version: int
    content: str
    engines: int
    failed: dict[str, str]


async def list_models(context: GatewayContext, request: Request) -> Response:
    """Return the base model and the adapters that the caller may use."""
    caller, may_use = caller_of(request), context.admission.may_use
    model = await context.engines.model()
    names = [model.name, *context.settings.model_aliases] if may_use(caller, model.name) else []
    cards = [_model_card(model, name) for name in names]
    adapters = await context.engines.adapters()
    cards += [_adapter_card(card, model, caller) for card in adapters if may_use(caller, card.name)]
    if ANTHROPIC_VERSION not in request.headers:
        return json_response(ModelList(data=cards))
    models = list(map(_anthropic_model, cards))
    ends = (models[0].id, models[-1].id) if models else (None, None)
    return json_response(AnthropicModelList(data=models, first_id=ends[0], last_id=ends[1]))


async def get_model(context: GatewayContext, request: Request) -> Response:
    """Return the base model or one adapter."""
    caller, name = caller_of(request), request.path_params["model"]
    target = await context.target(request, name, may_load=False)
    adapter = target.adapter
    card = _model_card(target.model, name) if adapter is None else _adapter_card(adapter, target.model, caller)
    return json_response(_anthropic_model(card) if ANTHROPIC_VERSION in request.headers else card)


async def load_adapter(context: GatewayContext, request: Request) -> Response:
    """Load an adapter from a directory on the engines' machines."""
    name = await _with_vllm_statuses(_load, context, request)
    return Response(f"Success: LoRA adapter '{name}' added successfully.", media_type="text/plain")


async def unload_adapter(context: GatewayContext, request: Request) -> Response:
    """Unload an adapter."""
    name = await _with_vllm_statuses(_unload, context, request)
    return Response(f"Success: LoRA adapter '{name}' removed successfully.", media_type="text/plain")


async def _with_vllm_statuses(change: Change, context: GatewayContext, request: Request) -> str:
    """Load or unload an adapter. Raises GatewayError with the status and type that vLLM has for the same error."""
    try:
        return await change(context, request)
    except (GatewayError, ServerError) as problem:
        error = to_gateway_error(problem)
        is_name_taken = error.status == 409 and error.param == "lora_name"
        other = (400, "InvalidUserInput") if is_name_taken else (error.status, error.kind)
        status, kind = _VLLM_STATUSES.get(error.code or "", other)
        raise replace(error, status=status, kind=kind) from None


async def _load(context: GatewayContext, request: Request) -> str:
    admin_only(caller_of(request))
    body = await read_body(request, LoadAdapter, context.settings)
    if body.lora_name in ((await context.engines.model()).name, *context.settings.model_aliases):
        raise GatewayError(409, "this is the base model's name; choose another", param="lora_name")
    path = body.lora_path
    if body.lora_sum is not None and path is None:
        with errors_as_400("lora_sum"):
            name = sum_name(body.lora_sum.items(), "lora_sum")
        if body.lora_name in body.lora_sum:
            raise GatewayError(400, f"lora_sum has {body.lora_name!r} itself; leave it out", param="lora_sum")
        await context.sum_card(request, name, "lora_sum")
        path = SUM_PATH + name
    elif path is None or body.lora_sum is not None:
        raise GatewayError(400, "give exactly one of lora_path and lora_sum", param="lora_path")
    elif path.startswith(SUM_PATH):
        raise GatewayError(400, "lora_path is a directory; give the weights of a sum in lora_sum", param="lora_path")
    try:
        await context.engines.load_adapter(body.lora_name, path, bool(body.load_inplace))
    except ServerError as problem:
        is_taken = problem.code == "adapter_in_use" and not body.load_inplace
        if is_taken and await context.engines.adapter(body.lora_name) is not None:
            raise replace(to_gateway_error(problem), param="lora_name") from None
        raise
    return body.lora_name


async def _unload(context: GatewayContext, request: Request) -> str:
    admin_only(caller_of(request))
    body = await read_body(request, UnloadAdapter, context.settings)
    await context.engines.unload_adapter(body.lora_name)
    return body.lora_name


async def update_adapter(context: GatewayContext, request: Request) -> Response:
    """Make the body, a safetensors file with the config in its metadata, the newest version of an adapter."""
    admin_only(caller_of(request))
    name, query = request.path_params["name"], request.query_params
    try:
        msgspec.convert(name, AdapterName)
    except msgspec.ValidationError:
        raise GatewayError(
            400, "an adapter's name has 1 to 128 letters, digits, '.', '_' and '-'", param="name"
        ) from None
    if name in ((await context.engines.model()).name, *context.settings.model_aliases):
        raise GatewayError(409, "this is the base model's name; choose another", param="name")
    unknown = next((key for key in query if key not in ("version", "inflight")), None)
    if unknown is not None:
        raise GatewayError(
            400, f"there is no parameter {unknown[:40]!r}; give version and inflight only", param="query"
        )
    version, inflight = query.get("version"), query.get("inflight", "pin")
    if version is not None and not re.fullmatch(r"[1-9][0-9]{0,8}", version):
        raise GatewayError(400, f"version={version[:40]!r} must be an integer from 1 to 999999999", param="version")
    if inflight not in INFLIGHT:
        raise GatewayError(400, f"inflight={inflight[:40]!r} must be 'pin' or 'switch'", param="inflight")
    nbytes = declared_bytes(request)
    parts = update_parts(request, nbytes, context.settings.body_seconds)
    upload = AdapterUpload(
        nbytes, parts, None if version is None else int(version), "switch" if inflight == "switch" else "pin"
    )
    made = await context.engines.update_adapter(name, upload)
    return json_response(
        AdapterUpdated(
            name=name, version=made.version, content=made.content, engines=made.updated, failed=dict(made.failed)
        )
    )


async def change_as_sglang(change: Change, context: GatewayContext, request: Request) -> Response:
    """Load or unload an adapter, with the result in SGLang's format."""
    try:
        await change(context, request)
    except (GatewayError, RequestError, ServerError, TimeoutError) as problem:
        error = to_gateway_error(problem)
        answer = AdaptersChanged(success=False, error_message=error.message, loaded_adapters={})
        return Response(encode(answer), error.status, media_type="application/json")
    adapters = await context.engines.adapters()
    return json_response(AdaptersChanged(success=True, loaded_adapters={card.name: card.path for card in adapters}))


def _model_card(model: ModelInfo, name: str) -> ModelCard:
    return ModelCard(id=name, created=model.created, root=model.name, max_model_len=model.max_model_len)


def _adapter_card(card: AdapterCard, model: ModelInfo, caller: Caller) -> ModelCard:
    return ModelCard(
        id=card.name,
        created=model.created,
        root=(card.path if caller.admin else "") or card.name,
        parent=model.name,
        max_model_len=model.max_model_len,
        rank=card.rank,
        content=card.content,
        places=dict(card.places),
    )


def _anthropic_model(card: ModelCard) -> AnthropicModel:
    created, length = datetime.fromtimestamp(card.created, UTC), card.max_model_len or 0
    return AnthropicModel(
        id=card.id, display_name=card.id, created_at=created, max_input_tokens=length, max_tokens=length
    )


def routes(context: GatewayContext) -> list[Route]:
    """Return the routes of the endpoints."""
    return [
        Route("/v1/models", functools.partial(list_models, context), methods=["GET"]),
        Route("/v1/models/", functools.partial(list_models, context), methods=["GET"]),
        Route("/v1/models/{model:path}", functools.partial(get_model, context), methods=["GET"]),
        Route("/v1/adapters/{name}", functools.partial(update_adapter, context), methods=["PUT"]),
        Route("/v1/load_lora_adapter", functools.partial(load_adapter, context), methods=["POST"]),
        Route("/v1/unload_lora_adapter", functools.partial(unload_adapter, context), methods=["POST"]),
        Route("/load_lora_adapter", functools.partial(change_as_sglang, _load, context), methods=["POST"]),
        Route("/unload_lora_adapter", functools.partial(change_as_sglang, _unload, context), methods=["POST"]),
    ]
