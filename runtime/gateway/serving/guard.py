"""What every request passes: its id, who asks, the last net for errors, and what the observer is told in the end."""

import re
import time
import uuid

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..contracts import Admission, GatewayError, HttpAnswer, Observer
from ..routes.errors import CLIENT_GONE, as_gateway_error, error_response
from ..settings import MAX_HEADER_BYTES

OPEN = frozenset({"/", "/health", "/ready", "/docs", "/openapi.json"})
"""Paths that need no key: probes have none, and the documents and the console say nothing about this server."""
_REQUEST_ID = re.compile(rb"[!-~]{1,64}")


class Guard:
    """Goes around the application. Each request gets `sidestream.request_id` and `sidestream.caller` in its scope."""

    def __init__(self, app: ASGIApp, admission: Admission, observer: Observer) -> None:
        self._app, self._admission, self._observer = app, admission, observer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = _header(scope, b"x-request-id")
        request_id = given.decode() if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope["sidestream.request_id"] = request_id
        began, began_at = time.monotonic(), time.time()
        status, sent, whole = CLIENT_GONE, 0, False

        async def told(message: Message) -> None:
            nonlocal status, sent, whole
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            else:
                sent += len(message.get("body", b""))
                whole = not message.get("more_body", False)
            await send(message)

        client = scope.get("client")
        host = client[0] if client else ""
        owner = ""
        try:
            if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADER_BYTES:
                raise GatewayError(431, f"the headers have more than {MAX_HEADER_BYTES} bytes")
            if scope["path"] not in OPEN:
                authorization = _header(scope, b"authorization").decode("latin-1") or None
                caller = scope["sidestream.caller"] = self._admission.identify(authorization, host)
                owner = caller.owner
            await self._app(scope, receive, told)
        except GatewayError as problem:
            await error_response(problem)(scope, receive, told)
        except Exception as problem:
            if status != CLIENT_GONE:  # the answer has begun: cutting the connection is all that is left
                raise
            await error_response(as_gateway_error(problem))(scope, receive, told)
        finally:
            route = scope.get("route")
            self._observer.answered(
                HttpAnswer(
                    time=began_at,
                    request_id=request_id,
                    method=scope["method"],
                    route=getattr(route, "path", ""),
                    path=scope["path"],
                    status=status if whole else CLIENT_GONE,
                    seconds=time.monotonic() - began,
                    body_bytes=sent,
                    client_host=host,
                    owner=owner,
                )
            )


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")
