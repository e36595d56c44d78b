"""/v1/messages over fake engines, without sockets: prompts, events, errors and keys."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
from sidestream.runtime.api.errors import EngineDeadError, OverloadedError
from sidestream.runtime.text.chat_files import ChatTemplates
from support import claude_code
from support.gateway import Books, FakeEngines, events, gateway
from support.messages import ASK, CALL, TEMPLATE, TOOLS, answering, replay


def run(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), 120))


async def prompt_of(change: dict[str, Any]) -> str:
    """The prompt that the engine gets for a body."""
    engines = answering("ok")
    async with gateway(engines) as http:
        answer = await http.post("/v1/messages", json=ASK | change)
        assert answer.status_code == 200, answer.text
    return str(engines.asked[0].prompt)


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "blocks", "reason"),
    [
        ("Ahoy there", [{"type": "text", "text": "Ahoy there"}], "end_turn"),
        ("", [{"type": "text", "text": ""}], "end_turn"),
        (CALL, [{"type": "tool_use", "name": "get", "input": {"a": 1}}], "tool_use"),
        (
            f"Let me see.\n{CALL}\n{CALL}",
            [{"type": "text", "text": "Let me see."}, *[{"type": "tool_use", "name": "get", "input": {"a": 1}}] * 2],
            "tool_use",
        ),
    ],
)
def test_an_answer_is_the_same_whole_and_streamed(
    text: str, blocks: list[dict[str, Any]], reason: str, size: int
) -> None:
    async def scene() -> None:
        engines = answering(text, size)
        async with gateway(engines) as http:
            whole = (await http.post("/v1/messages", json=ASK | {"tools": TOOLS})).json()
            streamed = await http.post("/v1/messages", json=ASK | {"tools": TOOLS, "stream": True})
        stream = events(streamed.text)
        again = replay(stream)
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert [event["type"] for event in stream[:2]] == ["message_start", "ping"]
        for line, event in zip(streamed.text.split("\n\n"), stream, strict=False):
            assert line.startswith(f"event: {event['type']}\n")
        for message in (whole, again):
            ids = [block.pop("id") for block in message["content"] if block["type"] == "tool_use"]
            assert len(set(ids)) == len(ids) and all(each.startswith("toolu_") for each in ids)
            assert message["content"] == blocks and message["stop_reason"] == reason
            assert message.pop("id").startswith("msg_")
        assert whole == again
        prompt, count = len(str(engines.asked[0].prompt)), max(1, -(-len(text) // size))
        assert whole["usage"] == {
            "input_tokens": prompt - 1, "cache_read_input_tokens": 1, "cache_creation_input_tokens": 0,
            "output_tokens": count, "output_tokens_details": {"thinking_tokens": 0},
        }  # fmt: skip
        assert (whole["model"], whole["role"], whole["type"]) == ("pirate", "assistant", "message")

    run(scene)


def test_the_end_of_an_answer_has_a_reason() -> None:
    async def scene() -> None:
        engines = answering("0123456789", 1)
        async with gateway(engines) as http:
            engines.reason = "length"
            limited = (await http.post("/v1/messages", json=ASK | {"max_tokens": 10})).json()
            engines.info = replace(engines.info, max_model_len=len(str(engines.asked[0].prompt)) + 10)
            full = (await http.post("/v1/messages", json=ASK | {"max_tokens": 32_000})).json()
            engines.reason, engines.stop = "stop", "9"
            stopped = (await http.post("/v1/messages", json=ASK | {"stop_sequences": ["9", "x"]})).json()
        assert (limited["stop_reason"], limited["stop_sequence"]) == ("max_tokens", None)
        assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "9")
        assert engines.asked[2].params.stop_strings == ("9", "x")
        assert full["stop_reason"] == "model_context_window_exceeded"

    run(scene)


def test_a_conversation_becomes_that_of_a_chat() -> None:
    """Blocks of every kind, with cache marks and the fields of betas, which change nothing."""
    mark = {"cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Q", "citations": None, **mark}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hmm", "signature": "s"},
                {"type": "redacted_thinking", "data": "s"},
                {"type": "text", "text": "A"},
                {"type": "tool_use", "id": "t1", "name": "get", "input": {"a": 1}, "caller": {"type": "direct"}},
                {"type": "tool_use", "id": "t2", "name": "put", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "R", **mark}]},
                {"type": "tool_result", "tool_use_id": "t2", "is_error": True, "content": "no"},
                {"type": "text", "text": "S"},
            ],
        },
        {"role": "user", "content": "T"},
        {"role": "system", "content": "U"},
    ]
    body = {"system": [{"type": "text", "text": "X", **mark}], "messages": messages, "tools": TOOLS, "speed": "fast"}
    prompt = asyncio.run(prompt_of(body | {"service_tier": "auto", "metadata": {"user_id": "u"}}))
    assert prompt == (
        "[tools get <tool_call>]<system>X<user>Q<assistant><think>hmm</think>A"
        'get{"a": 1}put{}<tool>R=get<tool>no=put<user>S\nT<system>U<assistant><think></think>'
    )


@pytest.mark.parametrize(
    ("thinking", "shown"),
    [
        ({"type": "enabled", "budget_tokens": 1024}, True),
        ({"type": "adaptive", "display": "omitted"}, False),
        ({"type": "disabled"}, False),
        (None, False),
    ],
)
@pytest.mark.parametrize("size", [1, 4])
def test_reasoning_is_a_block_of_its_own_if_it_is_wanted(thinking: Any, shown: bool, size: int) -> None:
    """A client that did not ask for it gets the text first."""

    async def scene() -> None:
        template = TEMPLATE.replace("<assistant>{% if", "<assistant><think>\n{% if false and")
        engines = answering("So what?\n</think>\n\nAhoy", size)
        engines.info = replace(engines.info, templates=ChatTemplates({"default": template}))
        async with gateway(engines) as http:
            whole = (await http.post("/v1/messages", json=ASK | {"thinking": thinking})).json()
            streamed = await http.post("/v1/messages", json=ASK | {"thinking": thinking, "stream": True})
        thought = [{"type": "thinking", "thinking": "So what?", "signature": ""}] if shown else []
        for message in (whole, replay(events(streamed.text))):
            assert 0 < message["usage"]["output_tokens_details"]["thinking_tokens"] <= message["usage"]["output_tokens"]
            assert message["content"] == [*thought, {"type": "text", "text": "Ahoy"}]

    run(scene)


def test_thinking_is_an_option_of_the_template() -> None:
    for thinking, end in (
        ({"type": "enabled", "budget_tokens": 2048}, "<assistant>"),
        ({"type": "adaptive"}, "<assistant>"),
        ({"type": "disabled"}, "<assistant><think></think>"),
        (None, "<assistant><think></think>"),
    ):
        assert asyncio.run(prompt_of({"thinking": thinking})).endswith(f"hi{end}")


def test_an_answer_continues_the_last_message_of_the_assistant() -> None:
    messages = [*ASK["messages"], {"role": "assistant", "content": "The answer is ("}]  # type: ignore[misc]
    assert asyncio.run(prompt_of({"messages": messages})).endswith("<user>hi<assistant>The answer is (")


@pytest.mark.parametrize(
    ("choice", "required", "parallel"),
    [
        (None, False, True),
        ({"type": "auto"}, False, True),
        ({"type": "auto", "disable_parallel_tool_use": True}, False, False),
        ({"type": "any"}, True, True),
        ({"type": "any", "disable_parallel_tool_use": True}, True, False),
        ({"type": "tool", "name": "get"}, True, False),
    ],
)
def test_a_choice_of_tools_is_that_of_a_chat(choice: Any, required: bool, parallel: bool) -> None:
    """The same grammar as for a chat with OpenAI's fields."""

    async def scene() -> None:
        engines = answering(CALL)
        functions = [{"type": "function", "function": {"name": "get", "parameters": TOOLS[0]["input_schema"]}}]
        named = {"type": "function", "function": {"name": "get"}}
        wanted = named if choice and choice["type"] == "tool" else "required" if required else "auto"
        chat = {"messages": ASK["messages"], "tools": functions, "tool_choice": wanted, "parallel_tool_calls": parallel}
        async with gateway(engines) as http:
            assert (await http.post("/v1/messages", json=ASK | {"tools": TOOLS, "tool_choice": choice})).is_success
            assert (await http.post("/v1/chat/completions", json=chat)).is_success
        ours, theirs = (request.params.structured_outputs for request in engines.asked)
        assert ours is not None and ours == theirs

    run(scene)


def test_fields_reach_the_engine_as_sampling_parameters() -> None:
    async def scene() -> None:
        engines, books = FakeEngines(), Books()
        fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 3, "max_tokens": 2}
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        more = {"output_config": {"format": {"type": "json_schema", "schema": schema}}, "priority": -1}
        async with gateway(engines, books) as http:
            answer = await http.post("/v1/messages", json=ASK | fields | more)
        assert answer.headers["x-ratelimit-limit-requests"] == "9"
        (request,) = engines.asked
        for name, value in fields.items():
            assert getattr(request.params, name) == value, name
        assert request.params.structured_outputs is not None and request.params.structured_outputs.json == json.dumps(
            schema
        )
        assert (request.adapter, request.priority) == ("pirate", -1)
        (record,) = books.records
        assert (record.endpoint, record.adapter, record.output_tokens) == ("/v1/messages", "pirate", 2)

    run(scene)


def test_count_tokens_counts_the_tokens_of_the_prompt() -> None:
    async def scene() -> None:
        engines = answering("ok")
        body = {"messages": ASK["messages"], "system": "S", "tools": TOOLS, "model": "pirate"}
        async with gateway(engines) as http:
            counted = await http.post("/v1/messages/count_tokens", json=body)
            answered = await http.post("/v1/messages", json=body | {"max_tokens": 4})
        usage = answered.json()["usage"]
        assert counted.json() == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}

    run(scene)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": []}] * 2, "system": []}, "messages has no content"),
        ({"temperature": "hot"}, "temperature='hot'"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type='web_search_20250305'"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name='a b'"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "put"}}, "tool_choice names 'put'"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type='some' must be 'auto' or 'any' or 'tool' or 'none'"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"$" * 300000: 1}}}}, "output_config.format"),
        ({"mcp_servers": [{"type": "url", "url": "https://x", "name": "x"}]}, "mcp_servers"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "[0].type='image'"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "reads text only"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text is missing"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "t", "name": "get", "input": {}}]}]},
            "messages[0].content[0] is a tool_use block",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "t"}]}]},
            "messages[0].content[0] is a tool_result block",
        ),
        (
            {
                "messages": [
                    *ASK["messages"],  # type: ignore[misc]
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "get", "input": {}}]},
                ]
            },
            "tool_result",
        ),
    ],
)
def test_a_fault_in_the_body_is_named_in_anthropic_s_format(change: dict[str, Any], named: str) -> None:
    async def scene() -> None:
        engines = answering("ok")
        async with gateway(engines) as http:
            answer = await http.post("/v1/messages", json=ASK | change)
        assert answer.status_code == 400 and answer.json().keys() == {"type", "error"}
        assert answer.json()["type"] == "error"
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error" and named in error["message"], error
        assert answer.headers["request-id"] == answer.headers["x-request-id"]
        assert not engines.asked

    run(scene)


def test_errors_have_anthropic_s_format_on_its_paths_only() -> None:
    async def scene() -> None:
        engines = FakeEngines()
        async with gateway(engines, Books("secret"), max_body_bytes=2000) as http:
            key = {"x-api-key": "secret"}

            async def error(path: str, body: Any = ASK, headers: Any = key, method: str = "POST") -> tuple[int, str]:
                answer = await http.request(method, path, json=body, headers=headers)
                return answer.status_code, answer.json()["error"]["type"]

            assert await error("/v1/messages", headers={}) == (401, "authentication_error")
            assert await error("/v1/messages", ASK | {"model": "nobody"}) == (404, "not_found_error")
            assert await error("/v1/messages", ASK | {"x": "y" * 3000}) == (413, "request_too_large")
            assert await error("/v1/messages", method="PUT") == (405, "invalid_request_error")
            assert await error("/v1/messages/batches") == (404, "not_found_error")
            engines.problem = lambda request: OverloadedError("full", "overloaded", 7.0)
            answer = await http.post("/v1/messages", json=ASK | {"stream": True}, headers=key)
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
            assert answer.json()["error"]["type"] == "rate_limit_error"
            engines.problem = lambda request: EngineDeadError("gone", "engine_dead", 5.0)
            assert await error("/v1/messages") == (503, "overloaded_error")
            chat = {"messages": ASK["messages"], "model": "nobody"}
            answer = await http.post("/v1/chat/completions", json=chat, headers=key)
            assert answer.json()["error"]["code"] == "model_not_found" and "type" not in answer.json()

    run(scene)


def test_an_error_in_a_stream_is_an_event() -> None:
    async def scene() -> None:
        engines = FakeEngines()
        engines.late = OverloadedError("full", "overloaded", 1.0)
        async with gateway(engines) as http:
            answer = await http.post("/v1/messages", json=ASK | {"stream": True})
        *_, last = answer.text.strip().split("\n\n")
        assert last.startswith("event: error\n")
        assert events(last + "\n\n") == [{"type": "error", "error": {"type": "rate_limit_error", "message": "full"}}]

    run(scene)


def test_claude_code_calls_a_tool_and_goes_on() -> None:
    """Its own request and the one with the tool's result."""

    async def scene() -> None:
        call = '<tool_call>\n{"name": "Bash", "arguments": {"command": "echo $((6*7))"}}\n</tool_call>'
        engines = answering(call)
        async with gateway(engines, Books("key")) as http:
            path, headers = "/v1/messages?beta=true", claude_code.HEADERS
            first = await http.post(path, json=claude_code.body("pirate", claude_code.TURN), headers=headers)
            (block,) = replay(events(first.text))["content"]
            assert (block["name"], block["input"]) == ("Bash", {"command": "echo $((6*7))"})
            talk = claude_code.next_turn([block], "42")
            engines.pieces = ["It is ", "42."]
            second = await http.post(path, json=claude_code.body("pirate", talk), headers=headers)
        assert replay(events(second.text))["content"] == [{"type": "text", "text": "It is 42."}]
        one, two = (str(request.prompt) for request in engines.asked)
        assert "billing" not in one and "<system>You are an agent.\n\n# Harness" in one
        assert "6*7?<system>Available agent types" in one
        assert two.startswith(one) and two.endswith("<tool>42=Bash<assistant>"), "the prefix cache has the first prompt"

    run(scene)


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        ("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", "<system>S<user>a<system>I<user>b"),
        (
            "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}"
            "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}",
            "<system>S<user>a\nI\nb",
        ),
        (
            "{% for m in messages %}{% if m.role != 'system' or loop.first %}<{{ m.role }}>{{ m.content }}{% endif %}"
            "{% endfor %}",
            "<system>S<user>a\nI\nb",
        ),
        ("{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}", "<user>a<user>b"),
    ],
)
def test_a_message_of_the_system_is_where_the_template_renders_it(template: str, prompt: str) -> None:
    """In place as in vLLM, unless the template refuses or drops it there: then its text is the user's."""
    talk = [
        {"role": "user", "content": "a"},
        {"role": "system", "content": [{"type": "text", "text": "x-anthropic-billing-header: cch=1"}]},
        {"role": "system", "content": "I"},
        {"role": "user", "content": "b"},
    ]

    async def scene() -> None:
        engines = answering("ok")
        engines.info = replace(engines.info, templates=ChatTemplates({"default": template}))
        body = ASK | {"system": "S", "messages": talk}
        async with gateway(engines) as http:
            for _ in range(2):
                assert (await http.post("/v1/messages", json=body)).status_code == 200
            counted = await http.post("/v1/messages/count_tokens", json={"system": "S", "messages": talk})
            rendered = await http.post("/v1/messages/render", json=body)
        assert [request.prompt for request in engines.asked] == [prompt] * 2
        assert counted.json()["input_tokens"] == len(rendered.json()["token_ids"]) == len(prompt)

    run(scene)
