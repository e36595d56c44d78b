"""The application: all routes, and the guard before them."""

import contextlib
from collections.abc import AsyncGenerator

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ...requests.errors import RequestError, ServerError
from ..contracts import Admission, Engines, GatewayError, Observer
from ..routes import chat, completions, models, pages, responses, status, tokens
from ..routes.desk import Desk
from ..routes.errors import CLIENT_GONE, answer_http_problem, answer_problem
from ..settings import GatewaySettings
from .guard import Guard

_FAMILIES = (chat, completions, responses, models, tokens, status, pages)


def build_app(engines: Engines, admission: Admission, observer: Observer, settings: GatewaySettings) -> Starlette:
    """The gateway as an ASGI application. Its lifespan starts the engines' connections and closes them."""
    desk = Desk(engines, admission, observer, settings)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None, None]:
        await engines.start()
        try:
            yield
        finally:
            await engines.close()
            desk.close()

    return Starlette(
        routes=[route for family in _FAMILIES for route in family.routes(desk)],
        middleware=[Middleware(Guard, admission=admission, observer=observer)],
        exception_handlers={
            GatewayError: answer_problem,
            RequestError: answer_problem,
            ServerError: answer_problem,
            TimeoutError: answer_problem,
            HTTPException: answer_http_problem,
            ClientDisconnect: _nobody_there,
        },
        lifespan=lifespan,
    )


async def _nobody_there(request: Request, problem: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)
