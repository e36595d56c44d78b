"""Error messages for invalid bodies: the field, its value, the allowed values, and what to do."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from sidestream.runtime.api.errors import RequestError, ServerError
from sidestream.runtime.gateway.interfaces import AdapterCard
from support.gateway import FakeEngines, gateway

COMPLETE, CHAT, RESPOND, LOAD = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/load_lora_adapter"


def said(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


# (path, body, the field that is named, what the message must hold)
BODIES: tuple[tuple[str, Any, str | None, tuple[str, ...]], ...] = (
    (COMPLETE, b"", None, ("the body is empty", "`prompt`")),
    (CHAT, b" \n", None, ("the body is empty", "`messages`")),
    (RESPOND, b"", None, ("the body is empty", "`input`")),
    (LOAD, b"", None, ("the body is empty", "`lora_name`")),
    ("/tokenize", b"", None, ("the body is empty",)),
    (CHAT, b'{"messages": [', None, ("ends in the middle",)),
    (CHAT, b"{'messages': 1}", None, ("not JSON",)),
    (CHAT, b'"hi"', None, ("must be a JSON object with `messages`, not a string",)),
    (CHAT, {}, "messages", ("messages is missing",)),
    (
        COMPLETE,
        {"prompt": "x", "logit_bias": {"bad1": 1, "7": 1, "bad2": 2}},
        "logit_bias",
        ("logit_bias: each key must be an integer, not a string; change 'bad1', 'bad2'",),
    ),
    (CHAT, {"messages": []}, "messages", ("messages must not be empty",)),
    (CHAT, {"messages": "hello"}, "messages", ("messages='hello' must be a list, not a string",)),
    (CHAT, {"messages": [{"role": "a bot", "content": "x"}]}, "messages[0].role", ("='a bot'", "letters, digits")),
    (
        CHAT,
        {"messages": [*said("x"), {"role": "function", "name": "f", "content": "1"}]},
        "messages[1].role",
        ("='function'", "of the role 'tool'"),
    ),
    (
        CHAT,
        {"messages": said([{"type": "text", "text": "x"}, {"type": "input_audio", "input_audio": {}}])},
        "messages[0].content[1].type",
        ("='input_audio' must be", "'text'", "reads text only"),
    ),
    (CHAT, {"messages": said([{"type": "poem"}])}, "messages[0].content[0].type", ("='poem' must be", "'text'")),
    (CHAT, {"messages": said([{"type": "text", "txt": "x"}])}, "messages[0].content[0].text", ("is missing; add it",)),
    (CHAT, {"messages": said([{"type": "refusal"}])}, "messages[0].content[0].refusal", ("is missing; add it",)),
    (CHAT, {"messages": said(["x"])}, "messages[0].content[0]", ("='x' must be an object",)),
    (
        CHAT,
        {"messages": said("x"), "tools": [{"type": "function", "name": "f"}]},
        "tools[0].name",
        ("put it into `tools[0].function`",),
    ),
    (COMPLETE, {"prompt": "x", "n": 999}, "n", ("n=999 must be an integer of at most 256",)),
    (
        COMPLETE,
        {"prompt": "x", "max_tokens": 0},
        "max_tokens",
        ("max_tokens=0 generates nothing; give at least 1, or echo=true",),
    ),
    (COMPLETE, {"prompt": "x", "top_p": -1}, "top_p", ("top_p=-1 must be a number above 0",)),
    (COMPLETE, {"prompt": "x", "seed": 1.5}, "seed", ("seed=1.5 must be an integer or null",)),
    (COMPLETE, {"prompt": "x", "temprature": 1}, "temprature", ("did you mean `temperature`?",)),
    (COMPLETE, {"prompt": "x", "max_new_tokens": 4}, "max_new_tokens", ("did you mean `max_tokens`?",)),
    (COMPLETE, {"prompt": "x", "zzz": 4}, "zzz", ("leave it out",)),
    (COMPLETE, {"prompt": "\udc00"}, "prompt", ("holds a lone surrogate",)),
    (COMPLETE, {"prompt": "x", "stop": ["y", "\ud83d"]}, "stop[1]", ("holds a lone surrogate",)),
    (CHAT, {"messages": said("a \ud83d b")}, "messages[0].content", ("holds a lone surrogate",)),
    (RESPOND, {"input": "x", "instructions": "\udfff"}, "instructions", ("holds a lone surrogate",)),
    (RESPOND, {"input": [{"role": "tool", "content": "x"}]}, "input[0].role", ("='tool'", "'developer'")),
    (LOAD, {"lora_name": "a b", "lora_path": "/x"}, "lora_name", ("='a b'", "letters, digits")),
    (LOAD, {"lora_name": "a", "lora_path": "/x", "replace": True}, "replace", ("did you mean `load_inplace`?",)),
)


@pytest.mark.parametrize(("path", "body", "param", "words"), BODIES, ids=[ascii(row[1])[:50] for row in BODIES])
def test_the_message_names_the_field_its_value_and_the_remedy(
    path: str, body: Any, param: str | None, words: tuple[str, ...]
) -> None:
    async def scene() -> httpx.Response:
        async with gateway(FakeEngines()) as http:
            return await http.post(
                path,
                content=body if isinstance(body, bytes) else json.dumps(body),
                headers={"Content-Type": "application/json"},
            )

    answer = asyncio.run(scene())
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param, error
    assert all(word in error["message"] for word in words), error
    assert "\n" not in error["message"] and "msgspec" not in error["message"]


class FullEngines(FakeEngines):
    """Its adapters' names are taken, as a server says it."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded = {"sql": "/adapters/sql"}
        self.cards = [AdapterCard("sql", 8, "aa")]

    async def load_adapter(self, name: str, path: str, replace: bool) -> None:
        if name in self.loaded and not replace:
            text = f"adapter {name!r} has already been loaded; use another name, or give replace=True"
            raise ServerError(text, "adapter_in_use")
        await super().load_adapter(name, path, replace)

    async def unload_adapter(self, name: str) -> None:
        refused = RequestError(f"adapter {name!r} is not known; list_adapters lists all")
        refused.code = "unknown_adapter"
        raise refused


def test_a_message_of_the_engine_is_in_words_of_http_and_its_remedy_works() -> None:
    async def scene() -> None:
        body = {"lora_name": "sql", "lora_path": "/adapters/new"}
        async with gateway(engines := FullEngines()) as http:
            refused = await http.post(LOAD, json=body)
            message = refused.json()["error"]["message"]
            assert refused.status_code == 400 and 'give "load_inplace": true' in message and "replace" not in message
            name, _, value = message.rpartition("give ")[2].partition(": ")
            again = await http.post(LOAD, json=body | {json.loads(name): json.loads(value)})
            assert again.status_code == 200 and engines.calls == [("load", "sql", "/adapters/new", True)]
            gone = await http.post("/v1/unload_lora_adapter", json={"lora_name": "x"})
            assert "/v1/models lists all" in gone.json()["error"]["message"]

    asyncio.run(scene())
