"""Keys and limits through the `Admission` interface."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
from sidestream.runtime.gateway.auth import edit_keys_file
from sidestream.runtime.gateway.auth.admission import KeyAdmission
from sidestream.runtime.gateway.auth.key_store import Key, KeyStore
from sidestream.runtime.gateway.auth.limits import DAY
from sidestream.runtime.gateway.auth.usage_log import UsageLog
from sidestream.runtime.gateway.interfaces import Caller, GatewayError, Ticket, UsageRecord


class Clock:
    """Both clocks, as a test sets them."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def wall(self) -> float:
        return 20_000 * DAY + self.seconds


class House:
    """A keys file with an admission over it."""

    def __init__(self, path: Path, log: UsageLog | None = None) -> None:
        self.path, self.clock = path, Clock()
        self.keys = {"first": edit_keys_file.add(path, Key("first", "", "somebody"))} if not path.exists() else {}
        self.admission = KeyAdmission(KeyStore(path), log, self.clock.now, self.clock.wall)

    def caller(self, name: str, **rights: object) -> Caller:
        """Who has a new key with these rights."""
        self.keys[name] = edit_keys_file.add(self.path, Key(name, "", f"owner-{name}", **rights))  # type: ignore[arg-type]
        return self.admission.identify(f"Bearer {self.keys[name]}", "127.0.0.1")

    def admit(
        self, caller: Caller, prompt: int, most: int | None = None, choices: int = 1, length: int = 4096
    ) -> Ticket:
        self.admission.count(caller, uses_tokens=True)
        return self.admission.admit(caller, "llama", prompt, most, choices, length)

    def refused(self, caller: Caller, prompt: int, most: int | None = None, choices: int = 1) -> GatewayError:
        with pytest.raises(GatewayError) as refusal:
            self.admit(caller, prompt, most, choices)
        return refusal.value


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path / "keys.toml")


def record(prompt: int, output: int, key: str = "a", time: float = 20_000 * DAY) -> UsageRecord:
    return UsageRecord(time, "r", "/v1/completions", "o", key, "llama", None, "", prompt, output, 0, 0.1, 0.2, 200)


def finish(ticket: Ticket, prompt: int, output: int) -> None:
    ticket.finish(record(prompt, output))


def test_who_sends_a_key_is_known_and_nobody_else(house: House) -> None:
    caller = house.caller("a", admin=True)
    assert caller == Caller("owner-a", "a", admin=True, metrics=True)
    assert house.caller("b") == Caller("owner-b", "b", admin=False, metrics=False)
    assert house.caller("c", metrics=True, models=()) == Caller("owner-c", "c", admin=False, metrics=True)
    assert house.admission.identify(f"bearer  {house.keys['a']} ", "10.0.0.1") == caller
    for header, code in (
        (None, "missing_api_key"),
        ("", "missing_api_key"),
        ("Bearer ", "missing_api_key"),
        (house.keys["a"], "missing_api_key"),
        (f"Basic {house.keys['a']}", "missing_api_key"),
        (f"Bearer {house.keys['a']}x", "invalid_api_key"),
        ("Bearer \udcff", "invalid_api_key"),
    ):
        with pytest.raises(GatewayError) as refusal:
            house.admission.identify(header, "127.0.0.1")
        assert (refusal.value.status, refusal.value.code) == (401, code)
        assert house.keys["a"] not in refusal.value.message


def test_a_revoked_key_and_an_expired_one_end(house: House) -> None:
    expires = datetime.fromtimestamp(house.clock.wall() + 10, UTC)
    caller, other = house.caller("a"), house.caller("b", expires=expires)
    house.clock.seconds = 10
    with pytest.raises(GatewayError) as refusal:
        house.admission.identify(f"Bearer {house.keys['b']}", "127.0.0.1")
    assert refusal.value.code == "expired_api_key"
    assert house.admission.may_use(caller, "llama") and house.admission.may_use(other, "llama")
    edit_keys_file.revoke(house.path, "a")
    with pytest.raises(GatewayError):
        house.admission.identify(f"Bearer {house.keys['a']}", "127.0.0.1")
    assert not house.admission.may_use(caller, "llama")
    assert house.refused(caller, 1, 1).status == 401


def test_a_key_over_its_requests_waits_and_others_do_not(house: House) -> None:
    one, two = house.caller("a", requests_per_minute=2), house.caller("b", requests_per_minute=2)
    first = house.admit(one, 1, 1, 1)
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    house.admit(one, 1, 1, 1)
    refusal = house.refused(one, 1, 1)
    assert (refusal.status, refusal.code, refusal.kind, refusal.retry_after) == (
        429,
        "rate_limit_exceeded",
        "requests",
        61,
    )
    assert refusal.headers["x-ratelimit-remaining-requests"] == "0"
    assert house.admit(two, 1, 1, 1)
    house.clock.seconds = 61
    assert house.admit(one, 1, 1, 1)


def test_tokens_are_reserved_and_what_was_not_used_is_free_again(house: House) -> None:
    caller = house.caller("a", tokens_per_minute=100)
    ticket = house.admit(caller, 20, 20, 2)
    assert ticket.max_tokens == 20 and ticket.headers["x-ratelimit-remaining-tokens"] == "40"
    assert house.refused(caller, 21, 20).kind == "tokens"
    finish(ticket, 20, 3)
    assert house.admit(caller, 57, 20, 1).headers["x-ratelimit-remaining-tokens"] == "0"


@pytest.mark.parametrize(
    ("model_len", "rights", "asked", "granted"),
    [
        (4096, {}, None, None),
        (4096, {}, 7, 7),
        (4096, {"max_tokens": 50}, None, 50),
        (4096, {"max_tokens": 50}, 70, 50),
        (4096, {"max_tokens": 50}, 30, 30),
        (4096, {"tokens_per_minute": 10_000}, None, 4086),
        (4096, {"tokens_per_minute": 1_000}, None, 495),
        (4096, {"tokens_per_minute": 1_000, "tokens_per_day": 100}, None, 45),
    ],
)
def test_what_a_request_may_produce(
    house: House, model_len: int, rights: dict[str, int], asked: int | None, granted: int | None
) -> None:
    choices = 2 if granted in (495, 45) else 1
    assert house.admit(house.caller("a", **rights), 10, asked, choices, model_len).max_tokens == granted


def test_what_is_too_large_for_the_limit_is_not_tried_again(house: House) -> None:
    refusal = house.refused(house.caller("a", tokens_per_minute=100), 100, 1)
    assert refusal.status == 429 and refusal.headers["x-should-retry"] == "false" and refusal.retry_after is None
    assert "101 tokens" in refusal.message and "100 tokens per minute" in refusal.message
    assert house.refused(house.caller("b", tokens_per_minute=100), 200).status == 429


def test_todays_tokens_survive_a_restart(tmp_path: Path) -> None:
    house = House(tmp_path / "keys.toml")
    caller = house.caller("a", tokens_per_day=100)
    log = UsageLog(tmp_path / "usage.db")
    ticket = house.admit(caller, 10, 90)
    assert ticket.max_tokens == 90 and ticket.headers["x-ratelimit-limit-tokens"] == "100"
    ticket.finish(record(10, 50))
    log.put(record(10, 50))
    log.put(record(1000, 1000, time=20_000 * DAY - 1))  # yesterday's
    log.close()

    log = UsageLog(tmp_path / "usage.db")
    again = House(tmp_path / "keys.toml", log=log)
    refusal = again.refused(caller, 10, 31)
    assert refusal.code == "insufficient_quota" and refusal.retry_after == DAY
    assert refusal.headers["x-ratelimit-reset-tokens"] == "24h0m0s"
    again.admit(caller, 10, 30, 1)
    log.close()


def test_limits_follow_the_file(house: House) -> None:
    caller = house.caller("a", requests_per_minute=1)
    house.admit(caller, 1, 1, 1)
    assert house.refused(caller, 1, 1).status == 429
    house.path.write_text(house.path.read_text().replace("requests_per_minute = 1", "requests_per_minute = 3"))
    house.admission.identify(f"Bearer {house.keys['a']}", "")
    assert house.admit(caller, 1, 1, 1).headers["x-ratelimit-remaining-requests"] == "1"
