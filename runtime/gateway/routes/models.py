"""/v1/models, and adapters that come and go."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..contracts import AdapterCard, GatewayError, ModelInfo
from ..shapes.models import AdapterChanged, LoadAdapter, ModelCard, ModelList, UnloadAdapter
from .bodies import read_body
from .desk import Desk, admin_only, caller_of, json_response


class Models:
    """The endpoints' handlers."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def all(self, request: Request) -> Response:
        """The base, and the adapters that the caller may use."""
        caller, may_use = caller_of(request), self._desk.admission.may_use
        model = await self._desk.engines.model()
        cards = [_base(model)] if may_use(caller, model.name) else []
        cards += [_card(card, model) for card in await self._desk.engines.adapters() if may_use(caller, card.name)]
        return json_response(ModelList(data=cards))

    async def one(self, request: Request) -> Response:
        """One of them."""
        target = await self._desk.target(caller_of(request), request.path_params["model"])
        return json_response(_base(target.model) if target.adapter is None else _card(target.adapter, target.model))

    async def load(self, request: Request) -> Response:
        """Make a directory on the engine's machine usable as an adapter."""
        admin_only(caller_of(request))
        body = await read_body(request, LoadAdapter, self._desk.settings)
        if body.lora_name == (await self._desk.engines.model()).name:
            raise GatewayError(409, "this is the base model's name; choose another", param="lora_name")
        await self._desk.engines.load_adapter(body.lora_name, body.lora_path, bool(body.load_inplace))
        return json_response(AdapterChanged(message=f"adapter {body.lora_name!r} is loaded"))

    async def unload(self, request: Request) -> Response:
        """Forget an adapter."""
        admin_only(caller_of(request))
        body = await read_body(request, UnloadAdapter, self._desk.settings)
        await self._desk.engines.unload_adapter(body.lora_name)
        return json_response(AdapterChanged(message=f"adapter {body.lora_name!r} is unloaded"))


def _base(model: ModelInfo) -> ModelCard:
    return ModelCard(id=model.name, created=model.created, root=model.name, max_model_len=model.max_model_len)


def _card(card: AdapterCard, model: ModelInfo) -> ModelCard:
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


def routes(desk: Desk) -> list[Route]:
    """The endpoints."""
    models = Models(desk)
    return [
        Route("/v1/models", models.all, methods=["GET"]),
        Route("/v1/models/{model:path}", models.one, methods=["GET"]),
        Route("/v1/load_lora_adapter", models.load, methods=["POST"]),
        Route("/v1/unload_lora_adapter", models.unload, methods=["POST"]),
    ]
