"""Calls of tools as Llama 3 and as Qwen spell them: OpenAI's client with a live server whose chat template has those
parts of theirs that matter here. Masks make the demo model, which never saw a tool, spell a call.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field
from sidestream.runtime.demo_model import DEMO_MODEL
from support.live_server import serving

LLAMA3 = """\
{%- if tools is not none and tools is defined %}
    {{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}. ' }}
    {%- for t in tools %}{{- t.function.name }}{{- "\\n" }}{%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- set call = message.tool_calls[0].function %}
        {{- 'assistant: {"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + "}\\n" }}
    {%- elif message.role == "tool" %}{{- "ipython: " + (message.content | tojson) + "\\n" }}
    {%- else %}{{- message.role + ": " + message.content + "\\n" }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "assistant: " }}{%- endif %}
"""
QWEN = """\
{%- if tools %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool.function.name }}{%- endfor %}
    {{- '\\n</tools>\\n<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- message.role + ": " + message.content }}
    {%- for tool_call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n{"name": "' + tool_call.function.name + '", "arguments": ' }}
        {{- tool_call.function.arguments | tojson }}{{- "}\\n</tool_call>" }}
    {%- endfor %}
    {{- "\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "assistant: " }}{%- endif %}
"""
OPENER = {"llama3": '{"name": "', "qwen": '<tool_call>\n{"name": "'}
CHAT: Any = [{"role": "user", "content": "What is the weather in Rome?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "get_time"}},
]
WEATHER: Any = {"type": "function", "function": {"name": "get_weather"}}
DRAWN: Any = {"model": "model", "temperature": 1.0, "seed": 3, "max_tokens": 120, "tools": TOOLS}


class GetWeather(BaseModel):
    """The weather somewhere."""

    city: str = Field(max_length=6)
    days: int = Field(ge=1, le=9)


@pytest.fixture(scope="module", params=["llama3", "qwen"])
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def client(form: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    model = tmp_path_factory.mktemp(form) / "model"
    shutil.copytree(DEMO_MODEL, model, ignore=shutil.ignore_patterns("adapters"))
    Path(model, "chat_template.jinja").write_text({"llama3": LLAMA3, "qwen": QWEN}[form])
    with serving(str(model), "--max-model-len", "384") as server:
        yield OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_a_call_is_told_whole_and_in_deltas(client: OpenAI) -> None:
    asked: Any = DRAWN | {"tool_choice": WEATHER}
    choice = client.chat.completions.create(messages=CHAT, **asked).choices[0]
    (call,) = choice.message.tool_calls or []
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert call.type == "function" and call.function.name == "get_weather"
    jsonschema.validate(json.loads(call.function.arguments), CITY)

    chunks = list(client.chat.completions.create(messages=CHAT, stream=True, **asked))
    told = [piece for chunk in chunks for each in chunk.choices for piece in each.delta.tool_calls or []]
    names = [piece.function.name for piece in told if piece.function]
    assert names[0] == "get_weather" and set(names[1:]) <= {None} and told[0].id
    assert "".join(piece.function.arguments or "" for piece in told if piece.function) == call.function.arguments
    assert len(told) > 2, "arguments come as they grow"
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert not any(each.delta.content for chunk in chunks for each in chunk.choices)


def test_the_model_spells_the_call_in_its_own_way(client: OpenAI, form: str) -> None:
    """The tokens that it made, from the log-probabilities of a call."""
    asked: Any = DRAWN | {"tool_choice": "required", "parallel_tool_calls": False, "logprobs": True}
    choice = client.chat.completions.create(messages=CHAT, **asked).choices[0]
    assert choice.logprobs is not None and choice.message.tool_calls is not None
    text = "".join(token.token for token in choice.logprobs.content or [])
    assert text.startswith(OPENER[form] + choice.message.tool_calls[0].function.name)  # type: ignore[union-attr]


def test_parse_gives_the_arguments_and_the_talk_goes_on(client: OpenAI) -> None:
    asked: Any = DRAWN | {"tools": [openai.pydantic_function_tool(GetWeather)], "tool_choice": "required"}
    asked |= {"parallel_tool_calls": False}
    message = client.chat.completions.parse(messages=CHAT, **asked).choices[0].message
    assert message.tool_calls is not None and isinstance(message.tool_calls[0].function.parsed_arguments, GetWeather)
    with client.chat.completions.stream(messages=CHAT, **asked) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.done" in kinds and final.tool_calls is not None
    assert final.tool_calls[0].function.parsed_arguments == message.tool_calls[0].function.parsed_arguments
    talk: Any = [*CHAT, message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sun"}]
    again = client.chat.completions.create(messages=talk, **DRAWN | {"tool_choice": "none"})
    assert again.choices[0].message.content and again.choices[0].message.tool_calls is None


def test_several_calls_are_told_apart(client: OpenAI) -> None:
    asked: Any = DRAWN | {"tool_choice": "required", "n": 2}
    for choice in client.chat.completions.create(messages=CHAT, **asked).choices:
        calls = choice.message.tool_calls or []
        assert calls and choice.message.content is None
        for call in calls if choice.finish_reason == "tool_calls" else calls[:-1]:
            schema = CITY if call.function.name == "get_weather" else {"maxProperties": 0}  # type: ignore[union-attr]
            jsonschema.validate(json.loads(call.function.arguments), schema)  # type: ignore[union-attr]


def test_what_a_grammar_cannot_express_is_left_out_unless_a_tool_is_strict(client: OpenAI) -> None:
    """Such as `propertyNames`, which Claude Code's tools have. The rest of the schema holds."""
    names = {"type": "object", "propertyNames": {"maxLength": 3}, "additionalProperties": False}
    schema = CITY | {"properties": CITY["properties"] | {"names": names}, "required": ["city", "unit", "names"]}
    function: Any = {"name": "get_weather", "parameters": schema}
    asked: Any = DRAWN | {"tool_choice": WEATHER}
    tools: Any = [{"type": "function", "function": function}]
    answer = client.chat.completions.create(messages=CHAT, **asked | {"tools": tools})
    (call,) = answer.choices[0].message.tool_calls or []
    jsonschema.validate(json.loads(call.function.arguments), schema)  # type: ignore[union-attr]
    strict: Any = [{"type": "function", "function": function | {"strict": True}}]
    with pytest.raises(openai.BadRequestError, match="propertyNames"):
        client.chat.completions.create(messages=CHAT, **asked | {"tools": strict})
