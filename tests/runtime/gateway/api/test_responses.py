"""/v1/responses with calls and reasoning: OpenAI's client reads the answers, and its types check each event."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter
from sidestream.runtime.protocol.messages import Chunk, TokenLogprob
from support.gateway import events, gateway
from support.scripted import ScriptedEngines

openai = pytest.importorskip("openai")
responses = pytest.importorskip("openai.types.responses")

PATH = "/v1/responses"
TEMPLATE = (
    "{% if tools %}<tools>{% for t in tools %}{{ t.function.name }} {% endfor %}</tools><tool_call>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content if m.content is string else m.content | map(attribute='text') | join('+') }}"
    "{% for c in m.tool_calls or [] %}[{{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }}]"
    "{% endfor %}"
    "{% if m.tool_call_id %}#{{ m.tool_call_id }}{% endif %}{% endfor %}"
    "<assistant>{% if enable_thinking is false %}<think></think>{% endif %}{{ reasoning_effort or '' }}"
)
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather somewhere.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
CLOCK = {"type": "function", "name": "clock", "parameters": None, "strict": None}
HEAD = '<tool_call>\n{"name": "weather", "arguments": '
TAIL = "}\n</tool_call>"
CALLS = [
    "<think>", "Two", " cities.", "</think>", "\n\n", "Let me", " look.", "\n", HEAD, '{"city": ', '"Rome"}', TAIL,
    "\n", HEAD, '{"city": "Oslo"}', TAIL,
]  # fmt: skip
USER = {"role": "user", "content": "Rome and Oslo?"}


class City(BaseModel):
    """A city."""

    city: str


def run(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), 120))


@asynccontextmanager
async def client(engines: ScriptedEngines) -> AsyncIterator[Any]:
    """OpenAI's client of a gateway over these engines."""
    async with gateway(engines) as http:
        yield openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", http_client=http, max_retries=0)


async def post(engines: ScriptedEngines, **body: Any) -> Any:
    """The answer's body, or its error."""
    async with gateway(engines) as http:
        answer = await http.post(PATH, json={"input": "hi"} | body)
    return answer.json() if answer.status_code == 200 else {"status": answer.status_code, **answer.json()["error"]}


async def streamed(engines: ScriptedEngines, **body: Any) -> list[Any]:
    """The events of a stream, each of which OpenAI's types accept."""
    async with gateway(engines) as http:
        found = events((await http.post(PATH, json={"input": "hi", "stream": True} | body)).text)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    for event in found:
        TypeAdapter(responses.ResponseStreamEvent).validate_python(event)
    return found


def shape(item: Any) -> tuple[Any, ...]:
    """An item without its ids."""
    if item["type"] == "function_call":
        return item["type"], item["name"], item["arguments"], item["status"]
    return item["type"], *[part["text"] for part in item["content"]], item["status"]


WANTED = [
    ("reasoning", "Two cities.", "completed"),
    ("message", "Let me look.", "completed"),
    ("function_call", "weather", '{"city": "Rome"}', "completed"),
    ("function_call", "weather", '{"city": "Oslo"}', "completed"),
]


def test_reasoning_text_and_calls_are_items_whole_and_streamed() -> None:
    async def scene() -> None:
        engines = ScriptedEngines(CALLS, template=TEMPLATE)
        whole = await post(engines, tools=[WEATHER, CLOCK])
        responses.Response.model_validate(whole)
        found = await streamed(engines, tools=[WEATHER, CLOCK])
        last = found[-1]["response"]
        assert [shape(item) for item in whole["output"]] == [shape(item) for item in last["output"]] == WANTED
        assert whole["status"] == "completed" and found[-1]["type"] == "response.completed"
        assert (
            whole["usage"]["output_tokens_details"] == {"reasoning_tokens": 4} == last["usage"]["output_tokens_details"]
        )
        ids = [item.get("call_id") or item["id"] for item in last["output"]]
        assert len(set(ids)) == 4 and last["output"][2]["call_id"] != last["output"][2]["id"]

    run(scene)


def test_the_events_of_a_stream_make_the_items() -> None:
    async def scene() -> None:
        found = await streamed(ScriptedEngines(CALLS, template=TEMPLATE), tools=[WEATHER])
        kinds = [event["type"].removeprefix("response.") for event in found]
        text = ["output_item.added", "content_part.added", "delta", "delta", "done", "content_part.done"]
        call = [
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
        ]
        assert kinds == [
            "created", "in_progress",
            *[f"reasoning_text.{kind}" if kind in ("delta", "done") else kind for kind in text], "output_item.done",
            *[f"output_text.{kind}" if kind in ("delta", "done") else kind for kind in text], "output_item.done",
            *call[:2], *call[1:], *call, "completed",
        ]  # fmt: skip
        items = found[-1]["response"]["output"]
        for event in found[2:-1]:
            item = items[event["output_index"]]
            assert event.get("item_id", item["id"]) == item["id"]
            if event["type"] == "response.output_item.done":
                assert event["item"] == item
            if event["type"] == "response.output_item.added":
                assert event["item"]["status"] == "in_progress" and not event["item"].get("content")
        for index, item in enumerate(items):
            deltas = [e["delta"] for e in found if e["type"].endswith(".delta") and e["output_index"] == index]
            assert "".join(deltas) == (item["arguments"] if "arguments" in item else item["content"][0]["text"])

    run(scene)


def test_openai_s_client_holds_a_conversation_with_calls() -> None:
    async def scene() -> None:
        engines = ScriptedEngines(CALLS, template=TEMPLATE)
        tool: Any = openai.pydantic_function_tool(City, name="weather")
        asked: Any = {"model": "pirate", "tools": [{"type": "function", **tool["function"]}]}
        async with client(engines) as api:
            async with api.responses.stream(input=[USER], include=["reasoning.encrypted_content"], **asked) as stream:
                kinds = [event.type async for event in stream]
                answer = await stream.get_final_response()
            assert kinds[-1] == "response.completed" and kinds.count("response.function_call_arguments.delta") == 3
            calls = [item for item in answer.output if item.type == "function_call"]
            assert [json.loads(call.arguments) for call in calls] == [{"city": "Rome"}, {"city": "Oslo"}]
            results = [
                {"type": "function_call_output", "call_id": call.call_id, "output": f"{place} is sunny"}
                for place, call in enumerate(calls)
            ]
            engines.pieces = ["Both", " are."]
            again = await api.responses.create(input=[USER, *answer.output, *results], **asked)
            assert again.output_text == "Both are."
        first, second = (call.call_id for call in calls)
        assert engines.asked[-1].prompt == (
            "<tools>weather </tools><tool_call><user>Rome and Oslo?<assistant>(Two cities.)Let me look."
            f'[{first} weather {{"city": "Rome"}}][{second} weather {{"city": "Oslo"}}]'
            f"<tool>0 is sunny#{first}<tool>1 is sunny#{second}<assistant>"
        )

    run(scene)


def test_text_is_parsed_and_a_schema_reaches_the_engine() -> None:
    async def scene() -> None:
        engines = ScriptedEngines(["<think>", "hm", "</think>", '{"city": ', '"Bonn"}'], template=TEMPLATE)
        async with client(engines) as api:
            parsed = await api.responses.parse(model="pirate", input="A city?", text_format=City)
        assert parsed.output_parsed == City(city="Bonn")
        constraint = engines.asked[0].params.structured_outputs
        assert constraint is not None and constraint.json and constraint.reasoning == "optional"

    run(scene)


@pytest.mark.parametrize(
    ("pieces", "items"),
    [
        (["<think>", "too long"], [("reasoning", "too long", "incomplete")]),
        (["Half a"], [("message", "Half a", "incomplete")]),
        ([HEAD, '{"city": "R'], [("function_call", "weather", '{"city": "R', "incomplete")]),
        (["Look: ", HEAD], [("message", "Look:", "completed"), ("function_call", "weather", "", "incomplete")]),
    ],
)
def test_the_last_item_of_an_answer_that_is_cut_off_is_incomplete(pieces: list[str], items: list[Any]) -> None:
    async def scene() -> None:
        engines = ScriptedEngines(pieces, "length", TEMPLATE)
        whole = await post(engines, tools=[WEATHER])
        found = await streamed(engines, tools=[WEATHER])
        assert [shape(item) for item in whole["output"]] == items
        assert [shape(item) for item in found[-1]["response"]["output"]] == items
        assert found[-1]["type"] == "response.incomplete" and whole["status"] == "incomplete"
        assert whole["incomplete_details"] == {"reason": "max_output_tokens"}

    run(scene)


def test_an_empty_answer_is_an_empty_message() -> None:
    async def scene() -> None:
        found = await streamed(ScriptedEngines([""], template=TEMPLATE))
        assert [shape(item) for item in found[-1]["response"]["output"]] == [("message", "", "completed")]

    run(scene)


@pytest.mark.parametrize(
    ("items", "prompt"),
    [
        (
            [USER, {"role": "assistant", "content": "a", "phase": None, "id": "m", "status": "completed"}],
            "<user>Rome and Oslo?<assistant>a<assistant>",
        ),
        (
            [
                {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "x"}]},
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "phase": "final_answer"},
                {"role": "assistant", "content": None},
            ],
            "<system>x<assistant>no<assistant><assistant>",
        ),
        (
            [USER, {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "zz"}, USER],
            "<user>Rome and Oslo?<user>Rome and Oslo?<assistant>",
        ),
        (
            [
                {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "so"}]},
                {"type": "function_call", "call_id": "c1", "name": "clock", "arguments": "", "namespace": "n"},
                {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "noon"}]},
                {"type": "function_call", "call_id": "c2", "name": "clock", "arguments": "{}", "status": None},
                {"type": "function_call_output", "call_id": "c2", "output": ""},
            ],
            "<assistant>(so)[c1 clock {}]<tool>noon#c1<assistant>[c2 clock {}]<tool>#c2<assistant>",
        ),
    ],
)
def test_items_become_messages_of_the_prompt(items: list[Any], prompt: str) -> None:
    async def scene() -> None:
        engines = ScriptedEngines(["x"], template=TEMPLATE)
        answer = await post(engines, input=items)
        assert answer.get("object") == "response", answer
        assert engines.asked[0].prompt == prompt

    run(scene)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": [USER, {"type": "item_reference", "id": "rs_9"}]}, "input[1]", ("'rs_9'", "store is off", "send")),
        ({"input": [{"type": "web_search_call", "id": "w"}]}, "input[0].type", ("web_search_call", "function_call")),
        ({"input": [USER, {"content": "x"}]}, "input[1].role", ("missing",)),
        ({"input": [{"role": "user"}]}, "input[0].content", ("missing",)),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id", ("missing",)),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output", ("missing",)),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]}, "input", ("JSON",)),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type", ("text",)),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", ("'web_search'", "'function'")),
        ({"tools": [WEATHER, WEATHER]}, "tools", ("same name",)),
        ({"tool_choice": "required"}, "tool_choice", ("tools is empty",)),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice", ("'f'",)),
        (
            {
                "tools": [WEATHER],
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
            },
            "tool_choice.tools[0].name",
            ("'f'", "not among tools"),
        ),
        ({"include": ["everything"]}, "include[0]", ("everything", "reasoning.encrypted_content")),
        ({"text": {"verbosity": "loud"}}, "text.verbosity", ("loud", "medium")),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", ("huge", "minimal")),
        ({"truncation": "middle"}, "truncation", ("middle", "disabled")),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format", ("schema",)),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"a": [[]]}}}, "top_k": -2}, "top_k", ()),
    ],
)
def test_what_is_not_served_is_named(body: dict[str, Any], param: str, words: tuple[str, ...]) -> None:
    async def scene() -> None:
        engines = ScriptedEngines(["x"], template=TEMPLATE)
        error = await post(engines, **body)
        assert (error["status"], error["param"]) == (400, param), error
        assert all(word in error["message"] for word in words), error["message"]
        assert not engines.asked

    run(scene)


def test_options_are_taken_and_repeated() -> None:
    async def scene() -> None:
        engines = ScriptedEngines(["x"], template=TEMPLATE)
        choice = {"type": "function", "name": "weather"}
        answer = await post(
            engines,
            tools=[WEATHER, CLOCK],
            tool_choice=choice,
            parallel_tool_calls=False,
            reasoning={"effort": "low", "summary": "auto"},
            text={"verbosity": "low"},
            truncation="auto",
            include=["reasoning.encrypted_content", "web_search_call.action.sources"],
            metadata=None,
            store=True,
        )
        made = responses.Response.model_validate(answer)
        assert made.tool_choice.name == "weather" and [tool.name for tool in made.tools] == ["weather", "clock"]
        assert made.tools[0].parameters == WEATHER["parameters"] and made.parallel_tool_calls is False
        assert (made.reasoning.effort, made.text.verbosity, made.truncation) == ("low", "low", "auto")
        assert engines.asked[0].prompt.endswith("<assistant>low") and answer["store"] is False
        allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "clock"}]}
        answer = await post(engines, tools=[WEATHER, CLOCK], tool_choice=allowed, reasoning={"effort": "none"})
        responses.Response.model_validate(answer)
        assert engines.asked[1].prompt.startswith("<tools>clock </tools>")
        assert engines.asked[1].prompt.endswith("<think></think>none")
        grammar = engines.asked[1].params.structured_outputs
        assert grammar is not None and grammar.grammar is not None and "start: calls\n" in grammar.grammar

    run(scene)


class ScoredEngines(ScriptedEngines):
    """Each token has a log-probability: minus its number."""

    def _taken(self, request: Any, chunk: Chunk) -> bool:
        return False

    async def stream(self, request: Any) -> Any:
        async for chunks in super().stream(request):
            yield [
                Chunk(
                    chunk.request_id, chunk.index, chunk.first, chunk.text, chunk.token_ids, chunk.finish_reason,
                    logprobs=[[TokenLogprob(token, -float(token), 1, b"t%d" % token)] for token in chunk.token_ids],
                    usage=chunk.usage,
                )
                for chunk in chunks
            ]  # fmt: skip


def test_log_probabilities_are_those_of_the_text() -> None:
    async def scene() -> None:
        engines = ScoredEngines(["<", "think>", "so", "</think>", "A", " b", ""], template=TEMPLATE)
        include = ["message.output_text.logprobs"]
        whole = await post(engines, include=include)
        found = await streamed(engines, include=include)
        wanted = ["t4", "t5", "t6"]
        for answer in (whole, found[-1]["response"]):
            assert [entry["token"] for entry in answer["output"][1]["content"][0]["logprobs"]] == wanted
        deltas = [event["logprobs"] for event in found if event["type"] == "response.output_text.delta"]
        assert [entry["token"] for delta in deltas for entry in delta] == wanted

    run(scene)


def test_raw_messages_are_the_prompt_and_the_answer() -> None:
    """With the markers of reasoning and calls, whole and in the last event of a stream."""

    async def scene() -> None:
        engines = ScriptedEngines(CALLS, template=TEMPLATE)
        body = {"input": [USER], "tools": [WEATHER], "enable_response_messages": True}
        async with gateway(engines) as http:
            whole = (await http.post(PATH, json=body)).json()
            plain = (await http.post(PATH, json=body | {"enable_response_messages": False})).json()
            streamed = events((await http.post(PATH, json=body | {"stream": True})).text)
        assert "input_messages" not in plain and "output_messages" not in plain
        prompt = engines.asked[0].prompt
        assert isinstance(prompt, list)
        for answer in (whole, streamed[-1]["response"]):
            (given,), (made,) = answer["input_messages"], answer["output_messages"]
            assert given == {"type": "raw_message_tokens", "message": "".join(map(chr, prompt)), "tokens": prompt}
            assert made["message"] == "".join(CALLS) and len(made["tokens"]) == len(CALLS)
            assert [item["type"] for item in answer["output"]].count("function_call") == 2

    run(scene)
