"""`stream_options`: the usage at the end of a stream, and in each of its events."""

import asyncio
from typing import Any

import pytest
from support.gateway import FakeEngines, events, gateway

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": ["four", "sixsix"], "n": 2, "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "n": 2, "max_tokens": 3},
}


def post(path: str, body: dict[str, Any], **settings: Any) -> tuple[int, Any]:
    async def scene() -> tuple[int, Any]:
        async with gateway(FakeEngines(), **settings) as http:
            answer = await http.post(path, json=body)
        return answer.status_code, events(answer.text) if body.get("stream") else answer.json()

    return asyncio.run(scene())


def usage(event: dict[str, Any]) -> tuple[int, int, int]:
    given = event["usage"]
    return given["prompt_tokens"], given["completion_tokens"], given["total_tokens"]


@pytest.mark.parametrize("total", [True, False, None])
@pytest.mark.parametrize("path", BODIES)
def test_each_event_has_the_tokens_of_its_completion_so_far(path: str, total: bool | None) -> None:
    options = {"continuous_usage_stats": True, "include_usage": total}
    status, streamed = post(path, BODIES[path] | {"stream": True, "stream_options": options})
    assert status == 200 and streamed.pop() == "[DONE]"
    if total:
        last = streamed.pop()
        whole = post(path, BODIES[path])[1]
        assert last["choices"] == [] and last["usage"] == whole["usage"]
    counts: dict[int, list[int]] = {}
    for event in streamed:
        (choice,) = event["choices"]
        prompt_tokens, completion_tokens, all_tokens = usage(event)
        expected = (len("four"), len("sixsix"))[choice["index"] // 2] if path == "/v1/completions" else 19
        assert prompt_tokens == expected and all_tokens == prompt_tokens + completion_tokens
        if choice.get("text") or choice.get("delta", {}).get("content"):
            counts.setdefault(choice["index"], []).append(completion_tokens)
    assert counts == {index: [1, 2, 3] for index in range(4 if path == "/v1/completions" else 2)}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("options", [{}, None, {"include_usage": False}, {"continuous_usage_stats": None}])
@pytest.mark.parametrize("stream", [True, False, None])
def test_options_without_effect_are_accepted(path: str, options: Any, stream: bool | None) -> None:
    status, answer = post(path, BODIES[path] | {"stream": stream, "stream_options": options})
    assert status == 200
    if stream:
        assert all("usage" not in event for event in answer[:-1])


@pytest.mark.parametrize("option", ["include_usage", "continuous_usage_stats"])
def test_an_option_with_an_effect_needs_a_stream(option: str) -> None:
    status, answer = post("/v1/chat/completions", BODIES["/v1/chat/completions"] | {"stream_options": {option: True}})
    assert status == 400 and answer["error"]["param"] == "stream_options"
    assert "needs stream=true" in answer["error"]["message"]


@pytest.mark.parametrize("path", BODIES)
def test_the_flag_of_the_server_is_as_if_the_client_had_asked(path: str) -> None:
    options = {"continuous_usage_stats": True, "include_usage": True}
    asked = post(path, BODIES[path] | {"stream": True, "stream_options": options})[1]
    forced = post(path, BODIES[path] | {"stream": True}, force_usage=True)[1]
    assert [usage(event) for event in forced[:-1]] == [usage(event) for event in asked[:-1]]
