"""CORS, and restrictions for pages of other origins on a server without keys."""

import argparse
import asyncio
import json
import re
from typing import Any

import httpx
import pytest
from sidestream.runtime.gateway.origin_policy import parse_origins
from sidestream.runtime.gateway.settings import MAX_HEADER_BYTES
from sidestream.tools.options.gateway import add_gateway_options, gateway_settings
from support.gateway import Books, FakeEngines, gateway

PAGE = "http://localhost:5173"
APP = "https://app.example"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
ADAPTER = {"lora_name": "new", "lora_path": "/adapters/new"}
KEY = {"Authorization": "Bearer secret"}


def asked(method: str, path: str, admission: Any = None, settings: Any = None, **request: Any) -> httpx.Response:
    async def scene() -> httpx.Response:
        async with gateway(FakeEngines(), admission, **settings or {}) as http:
            return await http.request(method, path, **request)

    return asyncio.run(scene())


def preflight(origin: str, path: str = "/v1/chat/completions", **given: Any) -> httpx.Response:
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
    }
    return asked("OPTIONS", path, headers=headers, **given)


OURS = ["http://localhost", PAGE, "https://127.0.0.1:8443", "http://[::1]:3000", "http://127.1.2.3:80"]
OTHERS = [
    APP, "null", "http://localhost.evil.example", "http://localhost:80@evil.example", "http://127.0.0.1.nip.io",
    "http://evil.example:3000", "https://localhost:8000/", "ftp://localhost", "http://[::2]:3000", "",
]  # fmt: skip


@pytest.mark.parametrize(("origin", "allowed"), [(each, True) for each in OURS] + [(each, False) for each in OTHERS])
def test_pages_of_this_machine_may_call_and_no_others(origin: str, allowed: bool) -> None:
    told = preflight(origin)
    assert told.is_success is allowed
    answer = asked("POST", "/v1/chat/completions", json=CHAT, headers={"Origin": origin})
    assert answer.status_code == (200 if allowed else 403)
    for each in (told, answer):
        assert each.headers.get("access-control-allow-origin") == (origin if allowed else None)
        assert "Origin" in each.headers["vary"] or not allowed
    if allowed:
        assert set(told.headers["access-control-allow-headers"].split(",")) >= {"authorization", "x-stainless-lang"}
        assert "POST" in told.headers["access-control-allow-methods"]
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
    else:
        assert "--allowed-origins" in answer.json()["error"]["message"]


@pytest.mark.parametrize(("named", "origin", "allowed"), [
    ([APP], APP, APP), ([APP], PAGE, None), ([APP, PAGE], PAGE, PAGE), (["*"], APP, "*"), (["*"], "null", "*"),
    ([], PAGE, None), (["https://app.example:444"], APP, None),
])  # fmt: skip
def test_named_origins_are_instead_of_them(named: list[str], origin: str, allowed: str | None) -> None:
    settings = {"allowed_origins": named}
    answer = asked("POST", "/v1/chat/completions", settings=settings, json=CHAT, headers={"Origin": origin})
    assert answer.headers.get("access-control-allow-origin") == allowed
    assert answer.status_code == (200 if allowed else 403)
    assert preflight(origin, settings=settings).is_success is (allowed is not None)


def test_preflights_need_no_key_and_errors_can_be_read() -> None:
    keyed: Any = {"admission": Books("secret"), "settings": {"api_key": "secret"}}
    assert preflight(PAGE, **keyed).is_success
    for status, request in (
        (401, {"json": CHAT}),
        (431, {"json": CHAT, "headers": {"x-long": "a" * MAX_HEADER_BYTES}}),
        (415, {"content": b"x", "headers": {**KEY, "content-type": "text/plain"}}),
        (400, {"json": {}, "headers": KEY}),
        (200, {"json": CHAT, "headers": KEY}),
        (200, {"json": {**CHAT, "stream": True}, "headers": KEY}),
    ):
        headers = {"Origin": PAGE, **request.pop("headers", {})}  # type: ignore[dict-item]
        answer = asked("POST", "/v1/chat/completions", headers=headers, **keyed, **request)
        assert answer.status_code == status, answer.text
        assert answer.headers["access-control-allow-origin"] == PAGE
    exposed = answer.headers["access-control-expose-headers"].split(", ")
    assert {name for name in answer.headers if name.startswith("x-")} <= {*exposed, "x-accel-buffering"}
    small = {"api_key": "secret", "max_body_bytes": 10}
    answer = asked("POST", "/v1/completions", Books("secret"), small, json=CHAT, headers={"Origin": PAGE, **KEY})
    assert answer.status_code == 413 and answer.headers["access-control-allow-origin"] == PAGE


def test_what_comes_from_no_page_is_as_before() -> None:
    for path in ("/v1/chat/completions", "/v1/load_lora_adapter"):
        answer = asked("POST", path, json=ADAPTER if "lora" in path else CHAT)
        assert answer.status_code == 200
        assert not any(name.startswith("access-control") for name in answer.headers)
    assert asked("OPTIONS", "/v1/chat/completions").status_code == 405


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/load_lora_adapter"])
@pytest.mark.parametrize("named", [None, ["*"]])
def test_no_page_changes_adapters_without_a_key(path: str, named: list[str] | None) -> None:
    """Nor by a request that browsers send without a preflight."""
    settings = {"allowed_origins": named}
    body = {"lora_name": "pirate", **ADAPTER} if "unload" not in path else {"lora_name": "pirate"}
    for headers in (
        {"Origin": PAGE},
        {"Origin": APP},
        {"Origin": "null"},
        {"Origin": PAGE, "Sec-Fetch-Site": "same-site"},
    ):
        answer = asked("POST", path, settings=settings, json=body, headers=headers)
        assert answer.status_code == 403 and "--api-key" in answer.json()["error"]["message"]
    own: tuple[dict[str, str], ...] = (
        {"Origin": "http://localhost"},
        {"Origin": "https://behind.a.proxy", "Sec-Fetch-Site": "same-origin"},
    )
    for headers in own:
        assert asked("POST", path, settings=settings, json=body, headers=headers).status_code == 200
    keyed = {**settings, "api_key": "secret"}
    assert asked("POST", path, Books("secret"), keyed, json=body, headers={"Origin": PAGE}).status_code == 401
    assert asked("POST", path, Books("secret"), keyed, json=body, headers={"Origin": PAGE, **KEY}).status_code == 200


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/chat/completions"])
def test_a_body_without_the_type_of_json_is_refused(path: str) -> None:
    """Browsers send such bodies without a preflight, some without an Origin."""
    bodies = {"/v1/load_lora_adapter": ADAPTER, "/v1/unload_lora_adapter": {"lora_name": "pirate"}}
    content = json.dumps(bodies.get(path, CHAT))
    for kind in (
        None,
        "",
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data",
        "application/jsonp",
    ):
        headers = {} if kind is None else {"Content-Type": kind}
        answer = asked("POST", path, content=content, headers=headers)
        assert answer.status_code == 415 and "Content-Type: application/json" in answer.json()["error"]["message"]
    for kind in ("application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"):
        assert asked("POST", path, content=content, headers={"Content-Type": kind}).status_code == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_browser_that_hides_its_origin_is_known_by_the_site(site: str) -> None:
    for path, body in (("/v1/unload_lora_adapter", {"lora_name": "pirate"}), ("/v1/chat/completions", CHAT)):
        answer = asked("POST", path, json=body, headers={"Sec-Fetch-Site": site})
        assert answer.status_code == 403 and answer.json()["error"]["code"] == "origin_not_allowed"
        assert asked("POST", path, json=body, headers={"Sec-Fetch-Site": "same-origin"}).status_code == 200


def test_the_flag_takes_vllms_list_and_names() -> None:
    parser = argparse.ArgumentParser()
    add_gateway_options(parser, ["--keys"])

    def settings(*flags: str) -> Any:
        options = parser.parse_args(["--usage-log", "none", *flags])
        return gateway_settings(argparse.Namespace(**vars(options), drain_seconds=1.0)).allowed_origins

    assert settings() is None
    assert settings("--allowed-origins", '["*"]') == ["*"]
    assert (
        settings("--allowed-origins", APP, PAGE) == settings("--allowed-origins", f'["{APP}", "{PAGE}"]') == [APP, PAGE]
    )
    assert settings("--allowed-origins", "[]") == []
    for wrong in ("app.example", "https://app.example/", "https://app.example/x", "[1]", '["*"', "", "https://"):
        with pytest.raises(ValueError, match=re.escape("--allowed-origins")):
            parse_origins([wrong])


def test_no_page_updates_adapters_without_a_key() -> None:
    """Its preflight is refused too: the gateway allows no PUT of other origins."""
    answer = asked("PUT", "/v1/adapters/pirate", content=b"x" * 20, headers={"Origin": APP})
    assert answer.status_code == 403 and "--api-key" in answer.json()["error"]["message"]
    preflight = {"Origin": APP, "Access-Control-Request-Method": "PUT"}
    assert asked("OPTIONS", "/v1/adapters/pirate", headers=preflight).status_code == 400
