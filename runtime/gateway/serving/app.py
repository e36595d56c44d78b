"""The application: all routes, and the guard before them."""

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from starlette.routing import Router

from ..contracts import Admission, Engines, Observer
from ..routes import chat, completions, models, pages, responses, status, tokens
from ..routes.desk import Desk
from ..settings import GatewaySettings
from .guard import Guard
from .origins import Origins

_FAMILIES = (chat, completions, responses, models, tokens, status, pages)


def build_app(engines: Engines, admission: Admission, observer: Observer, settings: GatewaySettings) -> Guard:
    """The gateway as an ASGI application. Its lifespan starts the engines' connections and closes them."""
    desk = Desk(engines, admission, observer, settings)

    @contextlib.asynccontextmanager
    async def lifespan(app: Any) -> AsyncGenerator[None, None]:
        await engines.start()
        try:
            yield
        finally:
            await engines.close()
            desk.close()

    router = Router([route for family in _FAMILIES for route in family.routes(desk)], lifespan=lifespan)
    return Guard(router, admission, observer, Origins(settings))
