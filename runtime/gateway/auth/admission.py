"""Implementations of `Admission`: with keys and limits, and without keys."""

import functools
import hashlib
import hmac
import math
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from ..interfaces import Caller, GatewayError, Ticket, UsageRecord
from .key_store import Key, KeyStore
from .limits import DAY, Account, Limits, Refusal, Reservation, limit_headers
from .usage_log import UsageLog


class KeyAdmission:
    """Admits clients with a key of `key_store`, within the key's limits. The limits hold for this process.

    log         its records of today count towards tokens_per_day
    now, wall   clocks in seconds: a monotonic one, and seconds since the epoch
    """

    def __init__(
        self,
        key_store: KeyStore,
        log: UsageLog | None = None,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.key_store = key_store
        self._now, self._wall = now, wall
        self._day = int(wall() // DAY)
        self._accounts = {
            name: Account(self._day, tokens)
            for name, tokens in ({} if log is None else log.tokens_since(self._day * DAY)).items()
        }

    def identify(self, authorization: str | None, client_host: str) -> Caller:
        """Return the owner of `Bearer KEY`. Raises GatewayError 401 without a key, or for an unknown or expired one."""
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise _unauthorized(
                "this server needs a key: send the header `Authorization: Bearer KEY`", "missing_api_key"
            )
        key_entry = self.key_store.find(key.strip())
        if key_entry is None:
            raise _unauthorized(
                "this key is unknown or revoked; ask the operator of the server for another",
                "invalid_api_key",
            )
        if key_entry.expired(datetime.fromtimestamp(self._wall(), UTC)):
            raise _unauthorized("this key has expired; ask the operator of the server for another", "expired_api_key")
        return Caller(key_entry.owner, key_entry.name, key_entry.admin, key_entry.admin or key_entry.metrics)

    def may_use(self, caller: Caller, model: str) -> bool:
        """Return whether one of the key's patterns matches the name."""
        key = self.key_store.keys.get(caller.key_id)
        return key is not None and key.allows(model)

    def count(self, caller: Caller, uses_tokens: bool) -> Mapping[str, str]:
        """Count one of the key's requests_per_minute. The headers are empty if `admit` follows, which returns them.

        Raises GatewayError like `admit`.
        """
        key, account = self._account(caller)
        limits = key.limits if uses_tokens else Limits(key.requests_per_minute)
        now, wall = self._now(), self._wall()
        refusal = account.count(limits, now, wall)
        if refusal is None and uses_tokens:
            return {}
        headers = limit_headers(account.request_status(limits, now), account.token_status(limits, now, wall))
        if refusal is not None:
            raise _limit_error(refusal, headers)
        return headers

    def admit(
        self, caller: Caller, model: str, prompt_tokens: int, max_tokens: int | None, choices: int, model_len: int
    ) -> Ticket:
        """Reserve the tokens of the prompt and of the longest answer.

        Raises GatewayError 429, or 401 if the key was revoked since `identify`.
        """
        key, account = self._account(caller)
        limits = key.limits
        granted = _granted(key, account.largest(limits), prompt_tokens, max_tokens, choices, model_len)
        now, wall = self._now(), self._wall()
        # without a limit on tokens, nothing is reserved for the answer
        reservation = account.reserve(limits, prompt_tokens + choices * (granted or 0), now, wall)
        headers = limit_headers(account.request_status(limits, now), account.token_status(limits, now, wall))
        if isinstance(reservation, Refusal):
            raise _limit_error(reservation, headers)
        return Ticket(headers, granted, functools.partial(self._settle, account, reservation))

    def _account(self, caller: Caller) -> tuple[Key, Account]:
        key = self.key_store.keys.get(caller.key_id)
        if key is None:
            raise _unauthorized("this key was revoked", "invalid_api_key")
        return key, self._accounts.setdefault(key.name, Account(self._day))

    def _settle(self, account: Account, reservation: Reservation, record: UsageRecord | None) -> None:
        """Return the tokens that a finished request did not use."""
        used = 0 if record is None else record.prompt_tokens + record.output_tokens
        account.settle(reservation, used, self._now(), self._wall())


def _granted(
    key: Key, largest: int | None, prompt_tokens: int, max_tokens: int | None, choices: int, model_len: int
) -> int | None:
    """Return the limit on the tokens of each completion; None: only the model's length.

    It is the requested limit or the key's. Without both, it is what fits into the model's length and into `largest`,
    the largest reservation that the key's limits allow.
    """
    given = [limit for limit in (max_tokens, key.max_tokens) if limit is not None]
    if given:
        return min(given)
    return None if largest is None else max(1, min((largest - prompt_tokens) // choices, model_len - prompt_tokens))


def _unauthorized(message: str, code: str) -> GatewayError:
    return GatewayError(401, message, "authentication_error", code)


def _limit_error(refusal: Refusal, headers: dict[str, str]) -> GatewayError:
    limit = refusal.limit.replace("_", " ")
    if math.isinf(refusal.seconds):
        message = (
            f"this request may use {refusal.requested} tokens, but the key's limit is {refusal.allowed} {limit}, so it "
            "is never admitted; shorten the prompt or lower max_tokens"
        )
        return GatewayError(
            429, message, "tokens", "rate_limit_exceeded", headers=headers | {"x-should-retry": "false"}
        )
    seconds = math.ceil(refusal.seconds)
    message = f"the key's limit of {refusal.allowed} {limit} is reached; try again in {seconds} s"
    if refusal.limit == "tokens_per_day":
        return GatewayError(
            429,
            message,
            "insufficient_quota",
            "insufficient_quota",
            retry_after=seconds,
            headers=headers | {"x-should-retry": "false"},
        )
    kind = refusal.limit.partition("_")[0]
    return GatewayError(429, message, kind, "rate_limit_exceeded", retry_after=seconds, headers=headers)


_ANONYMOUS = Caller("everyone", admin=True)


class NoAuth:
    """Admits every client that sends `api_key` or `admin_key`, without limits; without keys every client.

    With an `admin_key` the other key is a user's key: it loads no adapters and does not read /metrics.
    """

    def __init__(self, api_key: str = "", admin_key: str = "") -> None:
        user = Caller("everyone", metrics=False) if admin_key else _ANONYMOUS
        self._callers = [
            (hashlib.sha256(key.encode()).digest(), caller)
            for key, caller in ((api_key, user), (admin_key, Caller("admin", admin=True)))
            if key
        ]

    def identify(self, authorization: str | None, client_host: str) -> Caller:
        if not self._callers:
            return _ANONYMOUS
        scheme, _, key = (authorization or "").partition(" ")
        given = hashlib.sha256(key.strip().encode()).digest()
        for digest, caller in self._callers:
            if scheme.lower() == "bearer" and hmac.compare_digest(given, digest):
                return caller
        raise _unauthorized(
            "the API key is wrong or missing; send it as `Authorization: Bearer KEY`", "invalid_api_key"
        )

    def may_use(self, caller: Caller, model: str) -> bool:
        return True

    def admit(
        self, caller: Caller, model: str, prompt_tokens: int, max_tokens: int | None, choices: int, model_len: int
    ) -> Ticket:
        return Ticket(max_tokens=max_tokens)

    def count(self, caller: Caller, uses_tokens: bool) -> Mapping[str, str]:
        return {}
