"""What every request passes: its id, who asks, how errors are answered, and what the observer is told in the end."""

import re
import time
import uuid

from starlette.routing import Router
from starlette.types import Message, Receive, Scope, Send

from ..contracts import Admission, GatewayError, HttpAnswer, Observer
from ..routes.errors import CLIENT_GONE, answer_to
from ..routes.event_stream import DIRECT_BODY
from ..settings import MAX_HEADER_BYTES
from .origins import Origins

OPEN = frozenset({"/", "/health", "/ready", "/docs", "/openapi.json"})
"""Paths that need no key: probes have none, and the documents and the console say nothing about this server."""
_OF_PAGES = (b"origin", b"host", b"sec-fetch-site")
_REQUEST_ID = re.compile(rb"[!-~]{1,64}")


class Guard:
    """Goes around the routes. Each request gets `sidestream.request_id` and `sidestream.caller` in its scope."""

    def __init__(self, router: Router, admission: Admission, observer: Observer, origins: Origins) -> None:
        self.router = router
        self._admission, self._observer, self._origins = admission, observer, origins
        self._answer_pages = origins.answering(self._answer)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request; a page's carries its origin."""
        if scope["type"] == "http" and any(name == b"origin" for name, _ in scope["headers"]):
            await self._answer_pages(scope, receive, send)
        else:
            await self._answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self  # the router raises what it cannot serve, where there is an application
        if scope["type"] != "http":
            await self.router(scope, receive, send)
            return
        given, authorization, header_bytes = b"", None, 0
        page: dict[bytes, str] = {}
        for name, value in reversed(scope["headers"]):  # of one that is repeated, the first counts
            header_bytes += len(name) + len(value)
            if name == b"x-request-id":
                given = value
            elif name == b"authorization":
                authorization = value.decode("latin-1") or None
            elif name in _OF_PAGES:
                page[name] = value.decode("latin-1")
        request_id = given.decode() if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope["sidestream.request_id"] = request_id
        began, began_at = time.monotonic(), time.time()
        status, sent, whole = CLIENT_GONE, 0, False

        async def told(message: Message) -> None:
            nonlocal status, sent, whole
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            else:
                sent += len(message.get("body", b""))
                whole = not message.get("more_body", False)
            await send(message)

        client = scope.get("client")
        host = client[0] if client else ""
        owner = ""
        body = scope.get(DIRECT_BODY)
        try:
            if header_bytes > MAX_HEADER_BYTES:
                raise GatewayError(431, f"the headers have more than {MAX_HEADER_BYTES} bytes")
            if scope["path"] not in OPEN:
                caller = scope["sidestream.caller"] = self._admission.identify(authorization, host)
                owner = caller.owner
            if b"origin" in page:
                origin, host_header, site = (page.get(name, "") for name in _OF_PAGES)
                self._origins.check(origin, host_header, site, scope["method"], scope["path"])
            await self.router(scope, receive, told)
        except Exception as problem:
            if status != CLIENT_GONE:  # the answer has begun: cutting the connection is all that is left
                raise
            await answer_to(problem, scope["method"])(scope, receive, told)
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
                    body_bytes=sent + (body.sent if body is not None else 0),
                    client_host=host,
                    owner=owner,
                )
            )
