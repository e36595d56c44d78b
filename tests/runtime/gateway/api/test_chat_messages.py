"""Conversations as clients send them back: fields that other servers and SDKs add to messages do not fail a chat."""

import asyncio
from typing import Any

import httpx
import pytest
from sidestream.runtime.gateway.interfaces import ModelInfo
from sidestream.runtime.text.chat_files import ChatTemplates
from support.gateway import FakeEngines, gateway

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{% for part in m.content if m.content is not string %}{{ part.text }}|{% endfor %}"
    "{{ m.content if m.content is string }}"
    "{% for call in m.tool_calls or [] %}[{{ call.function.name }}{{ call.function.arguments.x }}]{% endfor %}"
    "{% endfor %}"
)
ASKED = {"role": "user", "content": "Q"}
FUNCTION = {"name": "f", "arguments": '{"x": 1}'}
CALL = {"id": "c", "type": "function", "function": FUNCTION}
THOUGHT = {"type": "thinking", "thinking": "R", "signature": "s"}
# messages after the first one, and the prompt
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "reasoning_content": ([{"role": "assistant", "content": "A", "reasoning_content": "R"}], "<assistant>(R)A"),
    "reasoning": ([{"role": "assistant", "content": "A", "reasoning": "R"}], "<assistant>(R)A"),
    "reasoning null": ([{"role": "assistant", "content": "A", "reasoning": None}], "<assistant>A"),
    "reasoning_details": (
        [{"role": "assistant", "content": "A", "reasoning_details": [{"type": "reasoning.text", "text": "R"}]}],
        "<assistant>A",
    ),
    "a thinking part": (
        [{"role": "assistant", "content": [THOUGHT, {"type": "text", "text": "A"}]}],
        "<assistant>(R)A|",
    ),
    "cache_control": (
        [{"role": "system", "content": [{"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}}]}],
        "<system>S|",
    ),
    "ids of an SDK": (
        [{"role": "assistant", "id": "msg_1", "phase": "final", "status": "completed", "content": "A", "name": "bot"}],
        "<assistant>A",
    ),
    "all of OpenAI's answer": (
        [
            {
                "role": "assistant", "content": "A", "refusal": None, "annotations": [], "audio": None,
                "function_call": None, "tool_calls": None, "parsed": {"a": 1}, "provider_specific_fields": {"b": 2},
            }
        ],
        "<assistant>A",
    ),
    "no content": ([{"role": "assistant", "content": None}], "<assistant>"),
    "no content beside calls": ([{"role": "assistant", "content": None, "tool_calls": [CALL]}], "<assistant>[f1]"),
    "a decorated call": (
        [
            {
                "role": "assistant",
                "tool_calls": [
                    CALL
                    | {"index": 0, "extra_content": {}, "cache_control": {}}
                    | {"function": FUNCTION | {"parsed_arguments": {"x": 1}, "description": "d"}}
                ],
            },
            {"role": "tool", "tool_call_id": "c", "name": "f", "content": None, "is_error": False},
        ],
        "<assistant>[f1]<tool>",
    ),
    "arguments as an object, no id": (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 2}}}]}],
        "<assistant>[f2]",
    ),
    "a refusal": ([{"role": "assistant", "content": None, "refusal": "No."}], "<assistant>No."),
    "a refusal part": ([{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}], "<assistant>No.|"),
    "parts of responses": (
        [{"role": "assistant", "content": [{"type": "output_text", "text": "A", "annotations": [], "logprobs": []}]}],
        "<assistant>A|",
    ),
    "a role of the template": ([{"role": "critic", "content": "C", "mood": 3}], "<critic>C"),
}  # fmt: skip


def post(engines: FakeEngines, path: str, body: dict[str, Any]) -> httpx.Response:
    async def scene() -> httpx.Response:
        async with gateway(engines) as http:
            return await http.post(path, json=body)

    return asyncio.run(scene())


def engines_with_template() -> FakeEngines:
    engines = FakeEngines()
    engines.info = ModelInfo("base", 256, 4096, True, ChatTemplates({"default": TEMPLATE}))
    return engines


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_conversation_is_answered(name: str) -> None:
    messages, prompt = CONVERSATIONS[name]
    engines = engines_with_template()
    answer = post(engines, "/v1/chat/completions", {"messages": [ASKED, *messages], "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    assert engines.asked[0].prompt == f"<user>Q{prompt}"


def test_messages_to_tokenize_are_the_same() -> None:
    messages, prompt = CONVERSATIONS["all of OpenAI's answer"]
    answer = post(engines_with_template(), "/tokenize", {"messages": [ASKED, *messages]})
    assert "".join(map(chr, answer.json()["tokens"])) == f"<user>Q{prompt}"


def test_tools_may_be_decorated() -> None:
    tool = {"type": "function", "function": {"name": "f"}, "cache_control": {"type": "ephemeral"}}
    body = {"messages": [ASKED], "tools": [tool], "tool_choice": "none", "max_tokens": 1}
    assert post(engines_with_template(), "/v1/chat/completions", body).status_code == 200


@pytest.mark.parametrize(
    ("message", "param", "said"),
    [
        ({"role": "user", "content": None}, "messages[0].content", "is missing; give a text"),
        ({"role": "function", "name": "f", "content": "1"}, "messages[0].role", "of the role 'tool'"),
        ({"role": "", "content": "x"}, "messages[0].role", "must be a name of letters"),
        (
            {"role": "assistant", "content": "", "function_call": CALL["function"]},
            "messages[0].function_call",
            "content",
        ),
        (
            {"role": "assistant", "content": "", "tool_calls": [{"id": "c"}]},
            "messages[0].tool_calls[0].function",
            "add",
        ),
    ],
)
def test_a_message_that_cannot_be_read_is_named(message: dict[str, Any], param: str, said: str) -> None:
    engines = engines_with_template()
    answer = post(engines, "/v1/chat/completions", {"messages": [message]})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param) and said in error["message"], error
    assert not engines.asked
