"""Who may ask and how much: keys and limits as an `Admission`, and an `Admission` that logs what was used."""

import math
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from ..contracts import Admission, Caller, GatewayError, Ticket, UsageRecord
from .keys import Key, KeyBook
from .limits import DAY, Account, Limits, Refusal, Reservation, headers
from .usage_log import UsageLog


class KeyAdmission:
    """Admits who sends a key of the book, within the key's limits, which hold for this process.

    log         its records of today count towards tokens_per_day
    now, wall   clocks in seconds; now only goes forward, wall counts from the epoch
    """

    def __init__(
        self,
        book: KeyBook,
        log: UsageLog | None = None,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.book = book
        self._now, self._wall = now, wall
        self._day = int(wall() // DAY)
        self._accounts = {
            name: Account(self._day, tokens)
            for name, tokens in ({} if log is None else log.tokens_since(self._day * DAY)).items()
        }

    def identify(self, authorization: str | None, client_host: str) -> Caller:
        """Whose `Bearer KEY` this is. Raises GatewayError 401 for none, an unknown, a revoked or an expired one."""
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise _unauthorized(
                "this server needs a key: send the header `Authorization: Bearer KEY`", "missing_api_key"
            )
        found = self.book.find(key.strip())
        if found is None:
            raise _unauthorized(
                "this key is not known here, or was revoked; ask the person who runs the server for another",
                "invalid_api_key",
            )
        if found.expired(datetime.fromtimestamp(self._wall(), UTC)):
            raise _unauthorized(
                "this key has expired; ask the person who runs the server for another", "expired_api_key"
            )
        return Caller(found.owner, found.name, found.admin, found.admin or found.metrics)

    def may_use(self, caller: Caller, model: str) -> bool:
        """Whether one of the key's patterns covers the name."""
        key = self.book.keys.get(caller.key_id)
        return key is not None and key.allows(model)

    def admit(
        self, caller: Caller, model: str, prompt_tokens: int, max_tokens: int | None, choices: int, model_len: int
    ) -> Ticket:
        """Reserves the prompt and all that may be produced. Raises GatewayError 429, or 401 when the key was revoked
        since the caller was identified.
        """
        key, account = self._account(caller)
        limits = Limits(key.requests_per_minute, key.tokens_per_minute, key.tokens_per_day)
        granted = _granted(key, account.largest(limits), prompt_tokens, max_tokens, choices, model_len)
        now, wall = self._now(), self._wall()
        # without a limit on tokens nothing is reserved for an answer of any length
        held = account.reserve(limits, prompt_tokens + choices * (granted or 0), now, wall)
        standing = headers(account.requests(limits, now), account.tokens(limits, now, wall))
        if isinstance(held, Refusal):
            raise _too_much(held, standing)
        return KeyTicket(self, account, held, standing, granted)

    def count(self, caller: Caller) -> Mapping[str, str]:
        """One more of the key's requests_per_minute. Raises GatewayError as `admit`."""
        key, account = self._account(caller)
        limits = Limits(key.requests_per_minute)
        now = self._now()
        held = account.reserve(limits, 0, now, self._wall())
        standing = headers(account.requests(limits, now), None)
        if isinstance(held, Refusal):
            raise _too_much(held, standing)
        return standing

    def _account(self, caller: Caller) -> tuple[Key, Account]:
        key = self.book.keys.get(caller.key_id)
        if key is None:
            raise _unauthorized("this key was revoked", "invalid_api_key")
        return key, self._accounts.setdefault(key.name, Account(self._day))

    def settle(self, account: Account, held: Reservation, record: UsageRecord) -> None:
        """A request ended: what it did not use is given back."""
        account.settle(held, record.prompt_tokens + record.output_tokens, self._now(), self._wall())


class KeyTicket:
    """A request that holds a reservation."""

    def __init__(
        self,
        admission: KeyAdmission,
        account: Account,
        held: Reservation,
        headers: Mapping[str, str],
        max_tokens: int | None,
    ) -> None:
        self.headers, self.max_tokens = headers, max_tokens
        self._admission, self._account, self._held = admission, account, held

    def finish(self, record: UsageRecord) -> None:
        """The request ended."""
        self._admission.settle(self._account, self._held, record)


class LoggedAdmission:
    """Another admission, whose requests are written to the usage log."""

    def __init__(self, inner: Admission, log: UsageLog) -> None:
        self.inner, self.log = inner, log

    def identify(self, authorization: str | None, client_host: str) -> Caller:
        """As the inner one."""
        return self.inner.identify(authorization, client_host)

    def may_use(self, caller: Caller, model: str) -> bool:
        """As the inner one."""
        return self.inner.may_use(caller, model)

    def admit(
        self, caller: Caller, model: str, prompt_tokens: int, max_tokens: int | None, choices: int, model_len: int
    ) -> Ticket:
        """As the inner one."""
        return LoggedTicket(self.inner.admit(caller, model, prompt_tokens, max_tokens, choices, model_len), self.log)

    def count(self, caller: Caller) -> Mapping[str, str]:
        """As the inner one; what asks for no tokens is not written down."""
        return self.inner.count(caller)


class LoggedTicket:
    """A ticket whose record is written."""

    def __init__(self, inner: Ticket, log: UsageLog) -> None:
        self.headers, self.max_tokens = inner.headers, inner.max_tokens
        self._inner, self._log = inner, log

    def finish(self, record: UsageRecord) -> None:
        """The request ended."""
        self._inner.finish(record)
        self._log.put(record)


def _granted(
    key: Key, largest: int | None, prompt_tokens: int, max_tokens: int | None, choices: int, model_len: int
) -> int | None:
    """What each completion may produce: what was asked for and the key's max_tokens allow; where neither says, the
    model's length and `largest`, which is what the key's limits can ever admit. None: as much as the model can.
    """
    asked = [limit for limit in (max_tokens, key.max_tokens) if limit is not None]
    if asked:
        return min(asked)
    return None if largest is None else max(1, min((largest - prompt_tokens) // choices, model_len - prompt_tokens))


def _unauthorized(message: str, code: str) -> GatewayError:
    return GatewayError(401, message, "authentication_error", code)


def _too_much(refusal: Refusal, standing: dict[str, str]) -> GatewayError:
    what = refusal.limit.replace("_", " ")
    if math.isinf(refusal.seconds):
        message = (
            f"this request may use {refusal.asked} tokens, and the key's limit is {refusal.allowed} {what}, so it is "
            "never admitted; shorten the prompt or lower max_tokens"
        )
        return GatewayError(
            429, message, "tokens", "rate_limit_exceeded", headers=standing | {"x-should-retry": "false"}
        )
    seconds = math.ceil(refusal.seconds)
    message = f"the key's limit of {refusal.allowed} {what} is reached; try again in {seconds} s"
    if refusal.limit == "tokens_per_day":
        return GatewayError(
            429,
            message,
            "insufficient_quota",
            "insufficient_quota",
            retry_after=seconds,
            headers=standing | {"x-should-retry": "false"},
        )
    kind = refusal.limit.partition("_")[0]
    return GatewayError(429, message, kind, "rate_limit_exceeded", retry_after=seconds, headers=standing)
