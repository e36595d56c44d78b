"""Pages of other origins: which of them may call the gateway (CORS), and what a page may not do without a key."""

import json
import re
from collections.abc import Iterable

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from ..contracts import GatewayError
from ..settings import GatewaySettings

ALL = "*"
LOOPBACK_ORIGIN = re.compile(r"https?://(localhost|127\.\d{1,3}\.\d{1,3}\.\d{1,3}|\[::1\])(:\d{1,5})?")
"""Origins that may call the gateway unless others are named: pages that this machine serves."""
ADMIN_PATHS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@]+")
_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_SAME_SITE = frozenset({"same-origin", "none"})  # "none": the user typed the address
_EXPOSED = (
    "x-request-id",
    "retry-after",
    "x-should-retry",
    *(f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")),
)


class Origins:
    """The origins that the settings allow. `guarded`: requests need a key, which a page has only from its user."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._allowed = settings.allowed_origins
        self._guarded = bool(settings.api_key) or settings.keys is not None

    def answering(self, app: ASGIApp) -> ASGIApp:
        """Return `app` with CORS: preflights are answered before it, and its answers carry the headers."""
        named = self._allowed
        return CORSMiddleware(
            app,
            allow_origins=named or (),
            allow_origin_regex=LOOPBACK_ORIGIN.pattern if named is None else None,
            allow_methods=("GET", "HEAD", "POST", "OPTIONS"),
            allow_headers=(ALL,),
            expose_headers=_EXPOSED,
        )

    def check(self, origin: str, host: str, site: str, method: str, path: str) -> None:
        """Refuse what a page of another origin may not do on a gateway without keys. A browser sends some requests
        without a preflight, so CORS alone only hides their answers.

        origin, host, site   headers Origin, Host and Sec-Fetch-Site ("": not sent)

        Raises GatewayError 403.
        """
        same = site in _SAME_SITE if site else origin.partition("://")[2] == host
        if self._guarded or same or method in _READING:
            return
        if path in ADMIN_PATHS:
            raise GatewayError(
                403,
                "a page of another origin cannot change the adapters of a server without keys; start it with --api-key "
                "or --api-keys, or call this from no page",
                code="origin_not_allowed",
            )
        if not self._allows(origin):
            raise GatewayError(
                403,
                f"pages of the origin {origin[:200]!r} cannot call this server; allow it with --allowed-origins",
                code="origin_not_allowed",
            )

    def _allows(self, origin: str) -> bool:
        if self._allowed is None:
            return LOOPBACK_ORIGIN.fullmatch(origin) is not None
        return ALL in self._allowed or origin in self._allowed


def parse_origins(values: Iterable[str]) -> list[str]:
    """Return the origins of --allowed-origins: each value is an origin, "*", or a JSON list of these, as vLLM takes it.

    Raises ValueError.
    """
    origins: list[str] = []
    for value in values:
        try:
            found = json.loads(value) if value.lstrip().startswith("[") else [value]
        except ValueError as error:
            raise ValueError(f"--allowed-origins {value} is no JSON list: {error}") from None
        for origin in found:
            if not isinstance(origin, str) or (origin != ALL and _ORIGIN.fullmatch(origin) is None):
                raise ValueError(
                    f"--allowed-origins: {origin!r} is not an origin; give scheme://host or scheme://host:port without "
                    "a path, as in https://app.example, or * for all"
                )
            origins.append(origin)
    return origins
