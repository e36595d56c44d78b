"""Messages of OpenAI's clients, as dicts and as their own objects."""

import json
from dataclasses import dataclass
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessage
from sidestream.runtime.api.errors import RequestError
from sidestream.runtime.text.chat_files import SingleChatTemplate
from sidestream.runtime.text.chat_messages import as_conversations
from sidestream.runtime.text.chat_renderer import ChatRenderer

ARGUMENTS = {"city": "Łódź", "days": [1, 2], "note": '"quoted"'}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": json.dumps(ARGUMENTS)}}
ASKED = {"role": "user", "content": "Well?"}
ANSWER = ChatCompletionMessage.model_validate({"role": "assistant", "content": None, "tool_calls": [CALL]})


def normal(*messages: Any) -> list[dict[str, Any]]:
    (conversation,) = as_conversations(list(messages))
    return conversation


@pytest.mark.parametrize(
    "answer",
    [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "content": "", "tool_calls": [{**CALL, "index": 0}], "refusal": None, "audio": None},
        {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "weather", "arguments": ARGUMENTS}}]},
        ANSWER,
        ANSWER.model_dump(),
    ],
    ids=["null", "empty", "dict", "object", "dumped"],
)
def test_calls_have_their_arguments_as_an_object(answer: Any) -> None:
    _, made, last = normal(ASKED, answer, {"role": "tool", "tool_call_id": "call_1", "content": "rain"})
    (call,) = made.pop("tool_calls")
    assert made == {"role": "assistant", "content": ""}
    assert call == {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
    assert last == {"role": "tool", "tool_call_id": "call_1", "content": "rain"}


def test_calls_without_arguments() -> None:
    for arguments in ("", "{}", None):
        call = {"function": {"name": "f", "arguments": arguments}}
        _, made = normal(ASKED, {"role": "assistant", "tool_calls": [call]})
        assert made["tool_calls"] == [{"function": {"name": "f", "arguments": {}}}]
    _, made = normal(ASKED, {"role": "assistant", "content": "x", "tool_calls": []})
    assert made == {"role": "assistant", "content": "x"}


def test_parts_roles_and_reasoning() -> None:
    parts = ["a", {"type": "text", "text": "b", "cache_control": {}}, {"type": "output_text", "text": "c"}]
    texts = [{"type": "text", "text": text} for text in ("a", "b", "c")]
    assert normal({"role": "developer", "content": parts}) == [{"role": "system", "content": texts}]
    (made,) = normal({"role": "assistant", "content": "x", "reasoning": "y"})
    assert made["reasoning_content"] == made["thinking"] == "y"


def test_reasoning_parts_leave_the_content() -> None:
    parts = [{"type": "thinking", "thinking": "a", "signature": "s"}, {"type": "reasoning", "text": "b"}, "c"]
    (made,) = normal({"role": "assistant", "content": parts})
    assert made["content"] == [{"type": "text", "text": "c"}] and made["reasoning_content"] == "a\nb"
    (made,) = normal({"role": "assistant", "content": parts, "reasoning": "given"})
    assert made["reasoning_content"] == "given"


@pytest.mark.parametrize("role", ["assistant", "tool"])
def test_what_was_returned_may_be_empty(role: str) -> None:
    assert normal({"role": role, "content": None}) == normal({"role": role}) == [{"role": role, "content": ""}]


def test_a_refusal_is_the_content_of_an_answer_without_one() -> None:
    (made,) = normal({"role": "assistant", "content": None, "refusal": "I will not."})
    assert made["content"] == "I will not."
    (made,) = normal({"role": "assistant", "content": "x", "refusal": "y"})
    assert made["content"] == "x"


def test_other_roles_are_kept_for_the_template() -> None:
    assert normal({"role": "critic-2", "content": "x"}) == [{"role": "critic-2", "content": "x"}]


def test_other_keys_do_no_harm() -> None:
    """Whatever they hold: a template sees JSON, or the name of a type."""

    @dataclass
    class Note:
        text: str

    odd = {"role": "user", "content": "hi", "id": 7, "note": Note("n"), "raw": {1, 2}, "made": object(), "none": None}
    renderer = ChatRenderer()
    try:
        words = SingleChatTemplate(
            "{{ messages[0].content }} {{ messages[0].note.text }} {{ messages[0].raw }}{{ messages[0].none }}"
        )
        assert renderer.prompts(words, [odd]) == ["hi n <set>"]
    finally:
        renderer.close()


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "system", "content": None}, "messages[0].content"),
        ({"role": "a b", "content": "x"}, "messages[0].role"),
        ({"role": "", "content": "x"}, "messages[0].role"),
        ({"role": "r" * 65, "content": "x"}, "messages[0].role"),
        ({"role": "function", "name": "f", "content": "1"}, "messages[0].role"),
        ({"role": "assistant", "content": [{"type": "thinking"}]}, "messages[0].content[0]"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": 3}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"text": "x"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": ["text"], "text": "x"}]}, "messages[0].content[0]"),
        ({"role": ["user"], "content": "x"}, "messages[0].role"),
        ({"role": "assistant", "tool_calls": "f()"}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [1]}, "messages[0].tool_calls[0]"),
        *(
            (
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]},
                "messages[0].tool_calls[0].function.arguments",
            )
            for arguments in ("{", "[1]", "1", 1, "[" * 100_000)
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_an_error_names_the_place(message: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refusal:
        as_conversations([message])
    assert getattr(refusal.value, "param", "") == param and str(refusal.value).startswith(param.split(".")[0])
