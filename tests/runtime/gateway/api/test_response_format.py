"""Structured outputs and tool calls with OpenAI's helpers and a server of the demo model."""

import json
from dataclasses import replace
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field
from sidestream import Client, SamplingParams

CHAT: Any = [{"role": "user", "content": "What is the capital of France?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "description": "The weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "get_time"}},
]
STICKY: Any = {"structured_outputs": {"regex": "(ab){20}"}, "ignore_eos": True}
DRAWN: Any = {"model": "demo_model", "temperature": 1.0, "seed": 3, "max_tokens": 200}


class Step(BaseModel):
    explanation: str = Field(max_length=8)
    output: Literal["a", "b"]


class MathResponse(BaseModel):
    steps: list[Step] = Field(max_length=2)
    final_answer: int = Field(ge=0, le=99)


class GetWeather(BaseModel):
    """The weather somewhere."""

    city: str = Field(max_length=6)
    days: int = Field(ge=1, le=9)


@pytest.fixture(scope="module")
def client(served: Any) -> OpenAI:
    return OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def test_parse_gives_objects(client: OpenAI) -> None:
    chat = client.chat.completions.parse(messages=CHAT, response_format=MathResponse, **DRAWN)
    assert isinstance(chat.choices[0].message.parsed, MathResponse)
    with client.chat.completions.stream(messages=CHAT, response_format=MathResponse, **DRAWN) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == chat.choices[0].message.parsed
    response = client.responses.parse(model="pirate", input="hi", text_format=MathResponse, max_output_tokens=200)
    assert isinstance(response.output_parsed, MathResponse)


def test_forms_of_chats_and_completions(client: OpenAI, served: Any) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    for model in ("demo_model", "pirate", "json"):
        asked = DRAWN | {"model": model}
        chat = client.chat.completions.create(messages=CHAT, response_format=form, n=2, **asked)
        for choice in chat.choices:
            jsonschema.validate(json.loads(choice.message.content or ""), CITY)
    bodies: list[tuple[dict[str, Any], str]] = [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes no"),
        ({"structured_outputs": {"regex": "[ab]{3}"}}, "aaa aab aba abb baa bab bba bbb"),
        ({"structured_outputs": {"grammar": 'start: "x" | "y"'}}, "x y"),
        ({"structured_outputs": {"grammar": '?start: "<b>"'}}, "<b>"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [7]}}}}, "7"),
    ]
    for fields, allowed in bodies:
        body = {"prompt": "What", "max_tokens": 40} | fields
        text = httpx.post(f"{served.url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
        assert text in allowed.split()
    any_json: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": True}}
    for fields in ({"structured_outputs": {"json": True}}, {"response_format": any_json}):
        body = {"prompt": "What", "max_tokens": 400, "logit_bias": {"22": 50, "1": 100}} | fields
        choice = httpx.post(f"{served.url}/v1/completions", json=body, timeout=60).json()["choices"][0]
        assert choice["finish_reason"] == "stop" and json.loads(choice["text"]) == 5
    anything = client.chat.completions.create(
        messages=CHAT, response_format={"type": "json_object"}, **DRAWN | {"logit_bias": {}, "max_tokens": 60}
    )
    assert (anything.choices[0].message.content or "").startswith("{")


def test_drafts_change_no_constrained_answer_and_are_counted(served: Any) -> None:
    """Over the engine's own protocol, where plans run ahead: of mixed adapters, next to free ones."""
    fields: Any = {"max_tokens": 80, "structured_outputs": {"json": CITY, "disable_any_whitespace": True}}
    params = [
        SamplingParams(temperature=0.7 * (index % 2), seed=index, n=1 + index // 4, **fields) for index in range(5)
    ]
    params += [SamplingParams(temperature=0, max_tokens=30), SamplingParams(temperature=0, max_tokens=60, **STICKY)]
    names = [None, "pirate", "json", "pirate", None, None, "pirate"]
    prompts = ['{"city": "Paris", "unit": "celsius"} and again {"city": "Paris", "unit": "celsius"}'] * len(params)
    with Client(served.address) as client:
        before = client.stats()
        outputs = client.generate(prompts, params, names)
        after = client.stats()
        plain = client.generate(prompts, [replace(each, speculation="off") for each in params], names)
    found, expected = ([[each.token_ids for each in output.outputs] for output in some] for some in (outputs, plain))
    assert found == expected
    for output in outputs[:5]:
        for each in output.outputs:
            jsonschema.validate(json.loads(each.text), CITY)
    for name, counted in (("draft", "num_draft_tokens"), ("accepted", "num_accepted_tokens")):
        by_output = [getattr(output, counted) for output in outputs]
        assert sum(by_output) <= after[f"{name}_tokens_total"] - before[f"{name}_tokens_total"]
        assert sum(by_output[:5]) > 0
    assert plain[0].num_draft_tokens == 0 and all(output.num_draft_tokens for output in outputs[:5])
    assert outputs[6].outputs[0].text == "ab" * 20 and outputs[6].num_accepted_tokens > 0


def test_tools_are_called(client: OpenAI) -> None:
    asked: Any = DRAWN | {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    choice = client.chat.completions.create(messages=CHAT, **asked).choices[0]
    (call,) = choice.message.tool_calls or []
    assert choice.finish_reason == "tool_calls" and choice.message.content is None and call.type == "function"
    arguments = json.loads(call.function.arguments)
    jsonschema.validate(arguments, CITY if call.function.name == "get_weather" else {"maxProperties": 0})

    chunks = list(client.chat.completions.create(messages=CHAT, stream=True, **asked))
    told = [piece for chunk in chunks for each in chunk.choices for piece in each.delta.tool_calls or []]
    first, *rest = told
    assert first.function is not None and first.function.name == call.function.name and first.id
    assert all(piece.index == 0 and piece.id is None and piece.function.name is None for piece in rest)  # type: ignore[union-attr]
    assert json.loads("".join(piece.function.arguments or "" for piece in told if piece.function)) == arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert not any(each.delta.content for chunk in chunks for each in chunk.choices)

    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    forced = client.chat.completions.create(messages=CHAT, **asked | {"tool_choice": named}).choices[0].message
    assert forced.tool_calls is not None and forced.tool_calls[0].function.name == "get_weather"  # type: ignore[union-attr]
    talk = [*CHAT, forced, {"role": "tool", "tool_call_id": forced.tool_calls[0].id, "content": "22 degrees"}]
    after = client.chat.completions.create(messages=talk, **DRAWN | {"tools": TOOLS, "tool_choice": "none"}).choices[0]
    assert after.message.content and after.message.tool_calls is None and after.finish_reason in ("stop", "length")


def test_tools_that_are_not_needed_change_no_answer(client: OpenAI) -> None:
    """tool_choice="auto": the model, which was never told of tools, says what it says without."""
    asked: Any = {"model": "pirate", "messages": CHAT, "temperature": 0, "max_tokens": 48}
    plain = client.chat.completions.create(**asked).choices[0]
    offered = client.chat.completions.create(tools=TOOLS, **asked).choices[0]
    streamed = client.chat.completions.create(tools=TOOLS, stream=True, **asked)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
    assert plain.message.content == offered.message.content == text and offered.finish_reason == "stop"
    assert offered.message.tool_calls is None


def test_parse_gives_the_arguments_of_calls(client: OpenAI) -> None:
    tools: Any = [openai.pydantic_function_tool(GetWeather)]
    asked: Any = DRAWN | {"tools": tools, "tool_choice": "required"}
    message = client.chat.completions.parse(messages=CHAT, **asked | {"parallel_tool_calls": False}).choices[0].message
    assert message.tool_calls is not None and isinstance(message.tool_calls[0].function.parsed_arguments, GetWeather)
    with client.chat.completions.stream(messages=CHAT, **asked | {"parallel_tool_calls": False}) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.done" in kinds and final.tool_calls is not None
    again = client.chat.completions.create(
        messages=[*CHAT, message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sun"}],  # type: ignore[list-item]
        **DRAWN,
    )
    assert again.choices[0].message.content


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_schema"}}, "response_format", "schema is missing"),
    ({"response_format": {"type": "yaml"}}, "response_format.type", "must be 'json_object'"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"uniqueItems": True}}}},
        "response_format",
        "Unimplemented keys",
    ),
    ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs", "look-around"),
    ({"structured_outputs": {"regex": "<i>(?!a)"}}, "structured_outputs", "<i>(?!a); error: look-around"),
    ({"structured_outputs": {"json": {"$ref": "#"}}}, "structured_outputs", "no text fits it"),
    ({"structured_outputs": {"json": False}}, "structured_outputs", "no answer matches"),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"anyOf": [{"$ref": "#"}]}},
            }
        },
        "response_format",
        "rule or a $ref that leads to nothing but itself",
    ),
    ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "structured_outputs", "exactly one"),
    (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs",
        "exclude each other",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#"}}}]},
        "tools",
        "cannot be used",
    ),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "letters, digits"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "same name"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "'x'"),
    ({"tool_choice": "required"}, "tool_choice", "tools is empty"),
    ({"tools": TOOLS, "structured_outputs": {"regex": "a"}}, "structured_outputs", "use response_format"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}]},
        "tools",
        "Unimplemented keys",
    ),
    (
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "["}}],
                }
            ]
        },
        "messages[0].tool_calls[0].function.arguments",
        "must be a JSON object",
    ),
    ({"guided_json": {"type": "object"}}, "guided_json", "use structured_outputs"),
]


@pytest.mark.parametrize(("fields", "param", "said"), REFUSED, ids=[said for _, _, said in REFUSED])
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_names_its_field(
    served: Any, fields: dict[str, Any], param: str, said: str, stream: bool
) -> None:
    body = {"messages": CHAT, "stream": stream} | fields
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=60)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and said in error["message"], error


def test_a_schema_that_ends_nowhere_is_the_clients_error_also_later(served: Any) -> None:
    """Its first tokens fit, and then none does."""
    never = {"type": "object", "properties": {"key": {"$ref": "#/$defs/x"}}, "required": ["key"]}
    never["$defs"] = {"x": {"anyOf": [{"$ref": "#/$defs/x"}]}}
    body = {"prompt": "x", "max_tokens": 400, "structured_outputs": {"json": never, "disable_any_whitespace": True}}
    answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=60)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "structured_outputs", error
    assert "no text fits it" in error["message"]
