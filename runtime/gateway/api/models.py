"""/v1/models, /v1/load_lora_adapter, /v1/unload_lora_adapter: bodies and handlers."""

import functools
from typing import Annotated, Literal

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..interfaces import AdapterCard, GatewayError, ModelInfo
from .body_types import AdapterName, Answer, Body, Ignored
from .context import GatewayContext, admin_only, caller_of, json_response
from .request_body import read_body


class ModelCard(Answer, frozen=True, kw_only=True):
    """The base model, or an adapter, with the base model as `parent`.

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


class LoadAdapter(Body, frozen=True, kw_only=True):
    """Loads a PEFT adapter from a directory on the engines' machines as `lora_name`."""

    lora_name: AdapterName
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096, pattern=r"^[^\x00]*$")]
    load_inplace: Annotated[bool, Meta(description="replace an adapter of the same name")] | None = None


class UnloadAdapter(Body, frozen=True, kw_only=True):
    """Unloads an adapter."""

    lora_name: AdapterName
    lora_int_id: Ignored = None


class AdapterChanged(Answer, frozen=True, kw_only=True):
    """Confirms the change."""

    message: str


async def list_models(context: GatewayContext, request: Request) -> Response:
    """Return the base model and the adapters that the caller may use."""
    caller, may_use = caller_of(request), context.admission.may_use
    model = await context.engines.model()
    names = [model.name, *context.settings.model_aliases] if may_use(caller, model.name) else []
    cards = [_model_card(model, name) for name in names]
    adapters = await context.engines.adapters()
    cards += [_adapter_card(card, model) for card in adapters if may_use(caller, card.name)]
    return json_response(ModelList(data=cards))


async def get_model(context: GatewayContext, request: Request) -> Response:
    """Return the base model or one adapter."""
    target = await context.target(caller_of(request), request.path_params["model"])
    if target.adapter is None:
        return json_response(_model_card(target.model, request.path_params["model"]))
    return json_response(_adapter_card(target.adapter, target.model))


async def load_adapter(context: GatewayContext, request: Request) -> Response:
    """Load an adapter from a directory on the engines' machines."""
    admin_only(caller_of(request))
    body = await read_body(request, LoadAdapter, context.settings)
    if body.lora_name in ((await context.engines.model()).name, *context.settings.model_aliases):
        raise GatewayError(409, "this is the base model's name; choose another", param="lora_name")
    await context.engines.load_adapter(body.lora_name, body.lora_path, bool(body.load_inplace))
    return json_response(AdapterChanged(message=f"adapter {body.lora_name!r} is loaded"))


async def unload_adapter(context: GatewayContext, request: Request) -> Response:
    """Unload an adapter."""
    admin_only(caller_of(request))
    body = await read_body(request, UnloadAdapter, context.settings)
    await context.engines.unload_adapter(body.lora_name)
    return json_response(AdapterChanged(message=f"adapter {body.lora_name!r} is unloaded"))


def _model_card(model: ModelInfo, name: str) -> ModelCard:
    return ModelCard(id=name, created=model.created, root=model.name, max_model_len=model.max_model_len)


def _adapter_card(card: AdapterCard, model: ModelInfo) -> ModelCard:
    return ModelCard(
        id=card.name,
        created=model.created,
        root=card.name,
        parent=model.name,
        max_model_len=model.max_model_len,
        rank=card.rank,
        content=card.content,
        places=dict(card.places),
    )


def routes(context: GatewayContext) -> list[Route]:
    """Return the routes of the endpoints."""
    return [
        Route("/v1/models", functools.partial(list_models, context), methods=["GET"]),
        Route("/v1/models/{model:path}", functools.partial(get_model, context), methods=["GET"]),
        Route("/v1/load_lora_adapter", functools.partial(load_adapter, context), methods=["POST"]),
        Route("/v1/unload_lora_adapter", functools.partial(unload_adapter, context), methods=["POST"]),
    ]
