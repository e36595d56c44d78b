"""/health, /ready, /version, /metrics."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .... import __version__
from ..contracts import EngineHealth, GatewayError
from ..shapes.status import Status, Version
from .desk import Desk, caller_of, json_response

RETRY_AFTER = {"Retry-After": "1"}


class StatusPages:
    """The endpoints' handlers."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def health(self, request: Request) -> Response:
        """Whether an engine is alive: 503 when none is. One that loads or drains is."""
        return _status(health := await self._desk.engines.health(), health.status != "dead")

    async def ready(self, request: Request) -> Response:
        """Whether requests are taken: 503 while the model is loaded, and when the server is about to stop."""
        return _status(health := await self._desk.engines.health(), health.status in ("ok", "stalled", "idle"))

    async def version(self, request: Request) -> Response:
        """This package's release."""
        return json_response(Version(version=__version__))

    async def metrics(self, request: Request) -> Response:
        """Counters and gauges for Prometheus. Raises GatewayError 403 for a key without that right."""
        if not caller_of(request).metrics:
            raise GatewayError(
                403, "this key may not read /metrics, which tells of all owners", "permission_error", "metrics_only"
            )
        kind, body = await self._desk.observer.metrics(self._desk.engines)
        return Response(body, headers={"Content-Type": kind})


def _status(health: EngineHealth, good: bool) -> Response:
    told = Status(status=health.status, phase=health.phase, progress=health.progress, engines=dict(health.engines))
    body = msgspec.json.encode(told)
    return Response(body, 200 if good else 503, None if good else RETRY_AFTER, "application/json")


def routes(desk: Desk) -> list[Route]:
    """The endpoints."""
    pages = StatusPages(desk)
    return [
        Route("/health", pages.health, methods=["GET"]),
        Route("/ready", pages.ready, methods=["GET"]),
        Route("/version", pages.version, methods=["GET"]),
        Route("/metrics", pages.metrics, methods=["GET"]),
    ]
