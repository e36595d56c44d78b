"""--api-key and --admin-key: one key with all rights, or a users' key and an admin's key."""

import argparse
import asyncio
from typing import Any

import httpx
import pytest
from sidestream.runtime.gateway.app import make_components
from sidestream.runtime.gateway.settings import GatewaySettings
from sidestream.tools.options.gateway import add_gateway_options, gateway_settings
from support.gateway import FakeEngines, gateway

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def settings(*flags: str) -> GatewaySettings:
    parser = argparse.ArgumentParser()
    add_gateway_options(parser, ["--keys"])
    options = parser.parse_args(["--usage-log", "none", *flags])
    made: GatewaySettings = gateway_settings(argparse.Namespace(**vars(options), drain_seconds=1.0))
    return made


def statuses(made: GatewaySettings, key: str) -> tuple[int, ...]:
    """Return the status of a chat, a list of models, /metrics, and an unload, with this key."""

    async def scene() -> tuple[int, ...]:
        parts = make_components(made, FakeEngines())  # type: ignore[arg-type]
        async with gateway(FakeEngines(), parts.admission, api_key=made.api_key) as http:

            def send(method: str, path: str, **body: Any) -> Any:
                return http.request(method, path, headers={"Authorization": f"Bearer {key}"}, **body)

            answers: list[httpx.Response] = [
                await send("POST", "/v1/chat/completions", json=CHAT),
                await send("GET", "/v1/models"),
                await send("GET", "/metrics"),
                await send("POST", "/v1/unload_lora_adapter", json={"lora_name": "pirate"}),
            ]
        return tuple(answer.status_code for answer in answers)

    return asyncio.run(scene())


def test_a_single_key_has_all_rights_and_the_start_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    made = settings("--api-key", "one")
    assert "load and unload adapters" in (said := capsys.readouterr().err) and "--admin-key" in said
    assert statuses(made, "one") == (200,) * 4 and statuses(made, "two") == (401,) * 4


def test_with_an_admin_key_the_other_one_is_a_users_key(capsys: pytest.CaptureFixture[str]) -> None:
    made = settings("--api-key", "one", "--admin-key", "two")
    assert capsys.readouterr().err == ""
    assert statuses(made, "one") == (200, 200, 403, 403)
    assert statuses(made, "two") == (200,) * 4 and statuses(made, "three") == (401,) * 4


def test_both_keys_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIDESTREAM_API_KEY", "one")
    monkeypatch.setenv("SIDESTREAM_ADMIN_KEY", "two")
    made = settings()
    assert (made.api_key, made.admin_key) == ("one", "two")


@pytest.mark.parametrize(("flags", "message"), [
    (("--admin-key", "two"), "--admin-key needs --api-key"),
    (("--api-key", "one", "--admin-key", "one"), "are the same"),
    (("--api-key", "one", "--admin-key", ""), "--admin-key is empty"),
    (("--admin-key", "two", "--keys", "keys.toml"), "a file of keys excludes"),
])  # fmt: skip
def test_contradictory_keys_are_refused(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings(*flags)
