"""Anthropic's Python client with a gateway that listens, over engines that answer what the test says."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sidestream.runtime.api.errors import OverloadedError
from sidestream.runtime.gateway.auth.admission import NoAuth
from support import claude_code
from support.gateway import FakeEngines, listening
from support.messages import ASK, CALL, TOOLS, answering

anthropic = pytest.importorskip("anthropic", reason="the anthropic package is not installed")


@contextmanager
def client_of(engines: FakeEngines, key: str = "secret") -> Iterator[Any]:
    with listening(engines, NoAuth("secret")) as (host, port):
        yield anthropic.Anthropic(base_url=f"http://{host}:{port}", api_key=key, max_retries=0)


def test_a_message_and_its_stream_have_the_sdk_s_types() -> None:
    from anthropic.types import Message, TextBlock, ToolUseBlock

    with client_of(answering(f"Let me see.\n{CALL}", 3)) as client:
        whole = client.messages.create(**ASK, tools=TOOLS)
        with client.messages.stream(**ASK, tools=TOOLS) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_message()
        counted = client.messages.count_tokens(model="pirate", messages=ASK["messages"], tools=TOOLS)
    Message.model_validate(whole.model_dump(), strict=True)
    text, call = whole.content
    assert isinstance(text, TextBlock) and isinstance(call, ToolUseBlock)
    assert (text.text, call.name, call.input) == ("Let me see.", "get", {"a": 1})
    assert [(each.type, getattr(each, "input", None)) for each in final.content] == [
        ("text", None),
        ("tool_use", call.input),
    ]
    assert whole.stop_reason == final.stop_reason == "tool_use" and whole._request_id
    assert final.usage == whole.usage and {"text", "input_json"} <= set(kinds)
    assert counted.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


def test_thinking_is_streamed_as_the_helper_expects() -> None:
    engines = answering("<think>So</think>Ahoy", 2)
    with client_of(engines) as client, client.messages.stream(**ASK, thinking={"type": "adaptive"}) as stream:
        thought = "".join(event.thinking for event in stream if event.type == "thinking")
        final = stream.get_final_message()
    assert [each.type for each in final.content] == ["thinking", "text"] and thought == final.content[
        0
    ].thinking == "So"


def test_errors_are_the_sdk_s() -> None:
    engines = FakeEngines()
    with client_of(engines) as client:
        with pytest.raises(anthropic.NotFoundError) as missing:
            client.messages.create(**ASK | {"model": "nobody"})
        assert missing.value.type == "not_found_error" and missing.value.request_id
        with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
            client.messages.create(**ASK | {"max_tokens": -1})
        engines.late = OverloadedError("full", "overloaded", 1.0)
        with pytest.raises(anthropic.APIStatusError, match="full"), client.messages.stream(**ASK) as stream:
            list(stream)
    with client_of(engines, "wrong") as client, pytest.raises(anthropic.AuthenticationError):
        client.models.list()


def test_models_are_listed_with_their_adapters() -> None:
    with client_of(FakeEngines()) as client:
        listed = list(client.models.list())
        one = client.models.retrieve("pirate")
    assert [each.id for each in listed] == ["base", "pirate", "shout"]
    assert one == listed[1] and (one.type, one.display_name) == ("model", "pirate") and one.created_at.year >= 1970


def test_claude_code_s_request_has_the_sdk_s_types() -> None:
    """So that the fixture does not drift from what a client can send."""
    from anthropic.types.beta.message_create_params import MessageCreateParamsStreaming
    from pydantic import TypeAdapter

    call = {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "echo"}}
    for messages in (claude_code.TURN, claude_code.next_turn([call], "42")):
        TypeAdapter(MessageCreateParamsStreaming).validate_python(claude_code.body("pirate", messages))
