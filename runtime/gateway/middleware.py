"""ASGI middleware around all routes: authentication, request ids, CORS, error responses, and access records."""

import asyncio
import re
import time
import uuid

from starlette.datastructures import URL, MutableHeaders
from starlette.routing import Router
from starlette.types import Message, Receive, Scope, Send

from .api.context import MODEL
from .api.errors import CLIENT_GONE, request_id_headers, response_for
from .api.event_stream import DIRECT_BODY
from .api.request_body import BODY_READ
from .connections import REFUSAL
from .intake.body_memory import BODY
from .intake.refusal_pace import PACED_STATUSES, RefusalPace
from .interfaces import KEY_HEADERS, Admission, GatewayError, HttpExchange, Observer
from .origin_policy import OriginPolicy
from .settings import MAX_HEADER_BYTES

OPEN_PATHS = frozenset({"/", "/health", "/ready", "/ping", "/docs", "/openapi.json"})
"""Paths that need no key: probes have none, and the pages hold no data of this server."""
_ORIGIN_HEADERS = (b"origin", b"host", b"sec-fetch-site")
MAX_DRAINED_BYTES = 64 << 10
"""Largest body of a failed request that is read, so that its connection can be used again."""
_REQUEST_ID = re.compile(rb"[!-~]{1,64}")


def _has_unread_body(scope: Scope) -> bool:
    """Return whether the request has an unread body above MAX_DRAINED_BYTES, or one of unknown length."""
    if BODY_READ in scope:
        return False
    for name, value in scope["headers"]:
        if name == b"transfer-encoding":
            return True
        if name == b"content-length":
            return not value.isdigit() or int(value.lstrip(b"0")[:20] or 0) > MAX_DRAINED_BYTES
    return False


def _authorization(keys: dict[bytes, str]) -> str | None:
    """Return the Authorization header of a request, or the one with the key of another header."""
    name = next((name for name in KEY_HEADERS if keys.get(name)), None)
    return None if name is None else keys[name] if name == KEY_HEADERS[0] else f"Bearer {keys[name]}"


def _path_below(root_path: str, path: str) -> str | None:
    """Return a path without the prefix; None if it does not have it."""
    rest = path.removeprefix(root_path)
    return (rest or "/") if rest != path and rest[:1] in ("", "/") else None


def _with_location_below(root_path: str, send: Send) -> Send:
    """Return `send` that adds the prefix to a redirection, which the proxy may pass on as it is."""

    async def send_below(message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] == 307:
            headers = MutableHeaders(raw=message["headers"])
            url = URL(headers["location"])
            headers["location"] = str(url.replace(path=root_path + url.path))
        await send(message)

    return send_below


class GatewayMiddleware:
    """Wraps the routes. Sets `sidestream.request_id` and `sidestream.caller` in each request's scope."""

    def __init__(
        self, router: Router, admission: Admission, observer: Observer, origins: OriginPolicy, root_path: str = ""
    ) -> None:
        self.router, self._root_path = router, root_path
        self._admission, self._observer, self._origins = admission, observer, origins
        self._refusal_pace = RefusalPace()
        self._serve_with_cors = origins.with_cors(self._serve)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. CORS answers preflights itself, so those to a foreign Host do not reach it.

        The prefix of a proxy is removed first and once, so that authentication and routes see the same path.
        """
        path = _path_below(self._root_path, scope["path"]) if self._root_path and scope["type"] == "http" else None
        if path is not None:
            scope["path"], send = path, _with_location_below(self._root_path, send)
        headers = dict(reversed(scope["headers"])) if scope["type"] == "http" else {}
        if b"origin" in headers and self._origins.allows_host(headers.get(b"host", b"").decode("latin-1")):
            await self._serve_with_cors(scope, receive, send)
        else:
            await self._serve(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self  # with an application in the scope, the router raises for unknown paths
        if scope["type"] != "http":
            await self.router(scope, receive, send)
            return
        given_id, header_bytes = b"", 0
        keys: dict[bytes, str] = {}
        origin_headers: dict[bytes, str] = {}
        for name, value in reversed(scope["headers"]):  # the first of repeated headers counts
            header_bytes += len(name) + len(value)
            if name == b"x-request-id":
                given_id = value
            elif name in KEY_HEADERS:
                keys[name] = value.decode("latin-1")
            elif name in _ORIGIN_HEADERS:
                origin_headers[name] = value.decode("latin-1")
        request_id = given_id.decode() if _REQUEST_ID.fullmatch(given_id) else uuid.uuid4().hex
        scope["sidestream.request_id"] = request_id
        id_headers = [(name, request_id.encode()) for name in request_id_headers(scope["path"])]
        started, started_at = time.monotonic(), time.time()
        status, sent_bytes, complete = CLIENT_GONE, 0, False

        async def recorded_send(message: Message) -> None:
            nonlocal status, sent_bytes, complete
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *id_headers]
            else:
                sent_bytes += len(message.get("body", b""))
                complete = not message.get("more_body", False)
            await send(message)

        client = scope.get("client")
        host = client[0] if client else ""
        owner, paced_as = "", host
        direct_body = scope.get(DIRECT_BODY)
        try:
            if header_bytes > MAX_HEADER_BYTES:
                raise GatewayError(431, f"the headers have more than {MAX_HEADER_BYTES} bytes")
            origin, host_header, site = (origin_headers.get(name, "") for name in _ORIGIN_HEADERS)
            self._origins.check_host(host_header)
            if scope["path"] not in OPEN_PATHS:
                if scope.get(REFUSAL) is not None:
                    raise scope[REFUSAL]
                caller = scope["sidestream.caller"] = self._admission.identify(_authorization(keys), host)
                owner = caller.owner
                paced_as = owner if caller.key_id else host
            if origin_headers.keys() - {b"host"}:
                self._origins.check(origin, host_header, site, scope["method"], scope["path"])
            await self.router(scope, receive, recorded_send)
        except Exception as problem:
            if status != CLIENT_GONE:  # the response has started: only closing the connection can report the error
                raise
            if isinstance(problem, GatewayError) and problem.status in PACED_STATUSES:
                delay = self._refusal_pace.delay(paced_as, started)
                if delay:
                    await asyncio.sleep(delay)
            response = response_for(problem, scope["method"], scope["path"])
            if _has_unread_body(scope):  # its rest is not worth reading
                response.headers["Connection"] = "close"
            await response(scope, receive, recorded_send)
        finally:
            if BODY in scope:
                scope[BODY].release()
            self._observer.on_http_exchange(
                HttpExchange(
                    time=started_at,
                    request_id=request_id,
                    method=scope["method"],
                    route=getattr(scope.get("route"), "path", ""),
                    path=scope["path"],
                    status=status if complete else CLIENT_GONE,
                    seconds=time.monotonic() - started,
                    body_bytes=sent_bytes + (direct_body.sent if direct_body is not None else 0),
                    client_host=host,
                    owner=owner,
                    model=scope.get(MODEL, ""),
                )
            )
