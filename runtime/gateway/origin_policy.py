"""Protection from pages of other origins: allowed origins (CORS), refused changes, and allowed Host headers."""

import json
import re
from collections.abc import Iterable

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from .addresses import ALL, host_name, is_address, is_loopback_name
from .interfaces import GatewayError
from .settings import GatewaySettings

LOOPBACK_ORIGIN = re.compile(r"https?://(localhost|127\.\d{1,3}\.\d{1,3}\.\d{1,3}|\[::1\])(:\d{1,5})?")
"""Origins that are allowed by default."""
ADMIN_PATHS = frozenset(f"{at}/{kind}_lora_adapter" for at in ("", "/v1") for kind in ("load", "unload"))
UPDATE_PATH = "/v1/adapters/"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@]+")
_READ_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_SAME_SITE = frozenset({"same-origin", "none"})  # "none": the user typed the address
_EXPOSED_HEADERS = (
    "x-request-id",
    "request-id",
    "retry-after",
    "x-should-retry",
    *(f"x-ratelimit-{kind}-{unit}" for kind in ("limit", "remaining", "reset") for unit in ("requests", "tokens")),
)


class OriginPolicy:
    """Which origins may call the gateway (CORS), which requests of other origins need a key, and which Hosts exist."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._allowed = settings.allowed_origins
        self._needs_key = bool(settings.api_key) or settings.keys is not None
        hosts = settings.allowed_hosts
        if ALL in (hosts or ()) or (hosts is None and not is_loopback_name(settings.host)):
            self._hosts: frozenset[str] | None = None
        else:
            self._hosts = frozenset({settings.host.lower(), *(hosts or ())})

    def with_cors(self, app: ASGIApp) -> ASGIApp:
        """Return `app` with CORS: it answers preflights and adds the headers."""
        return CORSMiddleware(
            app,
            allow_origins=self._allowed or (),
            allow_origin_regex=LOOPBACK_ORIGIN.pattern if self._allowed is None else None,
            allow_methods=("GET", "HEAD", "POST", "OPTIONS"),
            allow_headers=(ALL,),
            expose_headers=_EXPOSED_HEADERS,
        )

    def allows_host(self, header: str) -> bool:
        """Return whether a Host is a name of this server.

        A page whose name resolves to this machine's address ("DNS rebinding") has this server's origin for the
        browser, so only the Host tells that page from the server's own. A Host that is an address was not resolved, so
        it is allowed; probes send one. Clients that are not browsers may omit the Host.
        """
        if self._hosts is None or not header:
            return True
        name = host_name(header)
        return name is not None and (name in self._hosts or name == "localhost" or is_address(name))

    def check_host(self, header: str) -> None:
        """Raise GatewayError 421 for a Host that is not a name of this server."""
        if not self.allows_host(header):
            raise GatewayError(
                421,
                f"{header[:100]!r} is not a name of this server; use localhost or 127.0.0.1, or start the server with "
                f"--allowed-hosts {host_name(header) or 'NAME'}"[:400],
                code="host_not_allowed",
            )

    def check(self, origin: str, host: str, site: str, method: str, path: str) -> None:
        """Raise GatewayError 403 for a forbidden cross-origin request to a gateway without keys.

        Browsers send some requests without a preflight, and then CORS only hides the answer.

        origin, host, site   headers Origin, Host and Sec-Fetch-Site ("": not sent)
        """
        same = site in _SAME_SITE if site else origin in (f"http://{host}", f"https://{host}")
        if self._needs_key or same or method in _READ_METHODS:
            return
        if path in ADMIN_PATHS or path.startswith(UPDATE_PATH):
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
    """Return the origins of --allowed-origins. Each value is an origin, "*", or a JSON list of these (as in vLLM).

    Raises ValueError.
    """
    origins: list[str] = []
    for value in values:
        try:
            parsed = json.loads(value) if value.lstrip().startswith("[") else [value]
        except ValueError as error:
            raise ValueError(f"--allowed-origins {value} is not a JSON list: {error}") from None
        for origin in parsed:
            if not isinstance(origin, str) or (origin != ALL and _ORIGIN.fullmatch(origin) is None):
                raise ValueError(
                    f"--allowed-origins: {origin!r} is not an origin; give scheme://host or scheme://host:port without "
                    "a path, as in https://app.example, or * for all"
                )
            origins.append(origin)
    return origins
