"""Admission where nothing is asked for: everyone is let in, or everyone who has the one key."""

import hashlib
import hmac
from collections.abc import Mapping

from ..contracts import Caller, GatewayError, UsageRecord

_EVERYONE = Caller("everyone", admin=True)


class FreeTicket:
    """A request without limits."""

    def __init__(self, max_tokens: int | None) -> None:
        self.headers: Mapping[str, str] = {}
        self.max_tokens = max_tokens

    def finish(self, record: UsageRecord) -> None:
        """Nobody counts."""


class OpenDoor:
    """Lets everyone in who has `api_key` ("": everyone), for everything."""

    def __init__(self, api_key: str = "") -> None:
        self._digest = hashlib.sha256(api_key.encode()).digest() if api_key else None

    def identify(self, authorization: str | None, client_host: str) -> Caller:
        """See `Admission`."""
        if self._digest is not None:
            scheme, _, key = (authorization or "").partition(" ")
            digest = hashlib.sha256(key.strip().encode()).digest()
            if scheme.lower() != "bearer" or not hmac.compare_digest(digest, self._digest):
                raise GatewayError(
                    401,
                    "the API key is wrong or missing; send it as `Authorization: Bearer KEY`",
                    "authentication_error",
                    "invalid_api_key",
                )
        return _EVERYONE

    def may_use(self, caller: Caller, model: str) -> bool:
        """See `Admission`."""
        return True

    def admit(
        self, caller: Caller, model: str, prompt_tokens: int, max_tokens: int | None, choices: int, model_len: int
    ) -> FreeTicket:
        """See `Admission`."""
        return FreeTicket(max_tokens)

    def count(self, caller: Caller) -> Mapping[str, str]:
        """See `Admission`."""
        return {}
