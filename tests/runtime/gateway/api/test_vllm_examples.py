"""The requests of vLLM's documentation (its quickstart, its page on LoRA), as they stand there but for the models'
names, and the fields that its clients read from the answers.
"""

import asyncio
from typing import Any

import pytest
from support.gateway import FakeEngines, events, gateway

COMPLETION: dict[str, Any] = {"model": "base", "prompt": "San Francisco is a", "max_tokens": 7, "temperature": 0}
CHAT: dict[str, Any] = {
    "model": "base",
    "messages": [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Who won the world series in 2020?"},
    ],
}
USAGE = {"prompt_tokens": int, "total_tokens": int, "completion_tokens": int}
TEXT = {"index": int, "text": str, "logprobs": None, "finish_reason": str, "stop_reason": None, "prompt_logprobs": None}
MESSAGE = {"role": str, "content": str, "refusal": None, "reasoning_content": None, "reasoning": None}
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (
        "/v1/completions",
        COMPLETION,
        {"id": str, "object": "text_completion", "created": int, "model": "base", "choices": [TEXT], "usage": USAGE},
    ),
    ("/v1/completions", COMPLETION | {"model": "pirate"}, {"model": "pirate", "choices": [TEXT], "usage": USAGE}),
    (
        "/v1/chat/completions",
        CHAT | {"max_tokens": 5},
        {
            "id": str,
            "object": "chat.completion",
            "created": int,
            "model": "base",
            "choices": [{"index": 0, "message": MESSAGE, "logprobs": None, "finish_reason": str, "stop_reason": None}],
            "usage": USAGE,
            "prompt_logprobs": None,
        },
    ),
    ("/tokenize", {"model": "base", "prompt": "Hello"}, {"count": int, "max_model_len": int, "tokens": [int]}),
    ("/detokenize", {"model": "base", "tokens": [72, 101]}, {"prompt": "He"}),
]


def check(told: Any, expected: Any, where: str) -> None:
    """`expected`: a type, a value, a list whose entries are all alike, or fields that have to be there."""
    if isinstance(expected, dict):
        for name, value in expected.items():
            assert name in told, f"{where} lacks {name}"
            check(told[name], value, f"{where}.{name}")
    elif isinstance(expected, list):
        assert told, f"{where} is empty"
        for entry in told:
            check(entry, expected[0], where)
    elif isinstance(expected, type):
        assert isinstance(told, expected), f"{where} is {told!r}"
    else:
        assert told == expected, f"{where} is {told!r}"


@pytest.mark.parametrize(("path", "body", "expected"), CASES)
def test_answers_have_the_documented_fields(path: str, body: dict[str, Any], expected: dict[str, Any]) -> None:
    async def scene() -> None:
        async with gateway(FakeEngines()) as http:
            answer = await http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        check(answer.json(), expected, path)

    asyncio.run(scene())


def test_events_and_model_cards_have_the_documented_fields() -> None:
    async def scene() -> None:
        async with gateway(FakeEngines()) as http:
            asked = {"max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
            texts = events((await http.post("/v1/completions", json=COMPLETION | asked)).text)
            chat = events((await http.post("/v1/chat/completions", json=CHAT | asked)).text)
            models = (await http.get("/v1/models")).json()
        for told, kind in ((texts, "text_completion"), (chat, "chat.completion.chunk")):
            *chunks, usage, done = told
            assert done == "[DONE]"
            check(chunks, [{"id": str, "object": kind, "created": int, "model": "base", "usage": None}], kind)
            check(usage, {"usage": USAGE}, kind)
            assert usage["choices"] == []
        check(chat[0]["choices"], [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "the first delta")
        card = {"id": str, "object": "model", "created": int, "owned_by": str, "root": str, "max_model_len": int}
        check(models, {"object": "list", "data": [card]}, "/v1/models")
        assert {each["id"]: each["parent"] for each in models["data"]} == {
            "base": None,
            "pirate": "base",
            "shout": "base",
        }

    asyncio.run(scene())


@pytest.mark.parametrize("field", ["guided_choice", "guided_json", "guided_regex", "guided_grammar"])
def test_what_is_not_served_yet_is_named(field: str) -> None:
    async def scene() -> None:
        async with gateway(FakeEngines()) as http:
            answer = await http.post("/v1/chat/completions", json=CHAT | {field: ["positive", "negative"]})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == field

    asyncio.run(scene())
