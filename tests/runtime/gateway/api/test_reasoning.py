"""Reasoning apart from content in chats: whole, streamed, before calls and schemas, as template and body say."""

import asyncio
import shutil
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sidestream.runtime.demo_model import DEMO_MODEL
from sidestream.runtime.text.generation_config import eos_token_ids
from sidestream.runtime.text.structured.grammar_compiler import GrammarCompiler
from sidestream.runtime.text.tokenizer import Tokenizer, load_tokenizer
from support.gateway import events, gateway
from support.live_server import Served, serving
from support.masks import num_allowed
from support.scripted import ScriptedEngines

PATH = "/v1/chat/completions"
QWEN = (
    "{% if tools %}<tools>{{ tools }}</tools><tool_call>{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
R1 = QWEN.partition("{% if enable_thinking")[0] + "<think>\n{% endif %}"
PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "two and three?"}]}
THOUGHT = ["<think>", "\nIt", " is", " 5.", "\n", "</think>", "\n\n", "Five", "."]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "maxProperties": 0}}}
CALL = ["<think>", "add them", "</think>", "\n", '<tool_call>\n{"name": "add", "arguments": ', "{}", "}\n</tool_call>"]


def run(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), 120))


def joined(streamed: list[Any], field: str, index: int = 0) -> str | None:
    """A field of the deltas of one choice; None if no delta has it."""
    choices = [choice for event in streamed for choice in event["choices"] if choice["index"] == index]
    found = [choice["delta"][field] for choice in choices if field in choice["delta"]]
    return "".join(found) if found else None


async def ask(engines: ScriptedEngines, body: dict[str, Any], **settings: Any) -> tuple[Any, list[Any]]:
    """The answer, and the events of the same request as a stream with its usage."""
    async with gateway(engines, **settings) as http:
        whole = await http.post(PATH, json=CHAT | body)
        assert whole.status_code == 200, whole.text
        more = {"stream": True, "stream_options": {"include_usage": True}}
        *streamed, done = events((await http.post(PATH, json=CHAT | body | more)).text)
    assert done == "[DONE]"
    return whole.json(), streamed


@pytest.mark.parametrize(
    ("template", "form", "pieces", "reasoning", "content", "tokens"),
    [
        (QWEN, "auto", THOUGHT, "It is 5.", "Five.", 6),
        (R1, "auto", THOUGHT[1:], "It is 5.", "Five.", 5),
        (PLAIN, "auto", THOUGHT, None, "".join(THOUGHT), 0),
        (PLAIN, "qwen3", THOUGHT, "It is 5.", "Five.", 6),
        (PLAIN, "deepseek_r1", THOUGHT[1:], "It is 5.", "Five.", 5),
        (QWEN, "none", THOUGHT, None, "".join(THOUGHT), 0),
        (QWEN, "auto", ["Just", " 5"], None, "Just 5", 0),
    ],
)
def test_reasoning_is_apart_from_the_content(
    template: str, form: str, pieces: list[str], reasoning: str | None, content: str, tokens: int
) -> None:
    async def scene() -> None:
        answer, streamed = await ask(ScriptedEngines(pieces, template=template), {"n": 2}, reasoning_parser=form)
        for choice in answer["choices"]:
            message = choice["message"]
            assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)
            assert message.get("reasoning") == reasoning and choice["finish_reason"] == "stop"
        for index in range(2):
            assert joined(streamed, "content", index) == content
            assert joined(streamed, "reasoning_content", index) == joined(streamed, "reasoning", index) == reasoning
        for usage in (answer["usage"], streamed[-1]["usage"]):
            assert usage["completion_tokens_details"]["reasoning_tokens"] == 2 * tokens
            assert usage["completion_tokens"] == 2 * len(pieces)

    run(scene)


def test_reasoning_is_streamed_before_it_is_complete() -> None:
    async def scene() -> None:
        _, streamed = await ask(ScriptedEngines(THOUGHT, template=QWEN), {})
        deltas = [event["choices"][0]["delta"] for event in streamed if event["choices"]]
        kinds = ["reasoning_content" if "reasoning_content" in delta else "content" for delta in deltas if delta]
        assert kinds == ["content", *["reasoning_content"] * 3, "content", "content"], "the first one has the role"

    run(scene)


def test_the_prompt_and_the_body_switch_it_off() -> None:
    async def scene() -> None:
        engines = ScriptedEngines(["<think>", "as text"], template=QWEN)
        answer, streamed = await ask(engines, {"chat_template_kwargs": {"enable_thinking": False}})
        assert engines.asked[0].prompt.endswith("</think>\n\n")
        assert answer["choices"][0]["message"]["content"] == joined(streamed, "content") == "<think>as text"
        answer, streamed = await ask(ScriptedEngines(THOUGHT, template=QWEN), {"include_reasoning": False})
        nothing = dict.fromkeys(("refusal", "reasoning_content", "reasoning"))
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": "Five."} | nothing
        assert joined(streamed, "content") == "Five." and joined(streamed, "reasoning") is None
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 6

    run(scene)


def test_an_answer_that_ends_in_its_reasoning_has_no_content() -> None:
    async def scene() -> None:
        answer, streamed = await ask(ScriptedEngines(THOUGHT[:3], "length", QWEN), {})
        (choice,) = answer["choices"]
        assert choice["message"]["content"] is None and choice["message"]["reasoning"] == "It is"
        assert choice["finish_reason"] == "length" and joined(streamed, "reasoning") == "It is"
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3

    run(scene)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [("<think>I was", "It is 5.", "Five."), ("<think>I was</think> So", None, "".join(THOUGHT[1:]))],
)
def test_a_continued_message_says_where_the_answer_begins(text: str, reasoning: str | None, content: str) -> None:
    async def scene() -> None:
        messages = [*CHAT["messages"], {"role": "assistant", "content": text}]
        body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
        answer, _ = await ask(ScriptedEngines(THOUGHT[1:], template=QWEN), body)
        message = answer["choices"][0]["message"]
        assert (message.get("reasoning"), message["content"]) == (reasoning, content)

    run(scene)


def test_calls_follow_the_reasoning() -> None:
    async def scene() -> None:
        answer, streamed = await ask(ScriptedEngines(CALL, template=QWEN), {"tools": [TOOL], "tool_choice": "required"})
        (choice,) = answer["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert call["function"] == {"name": "add", "arguments": "{}"} and choice["finish_reason"] == "tool_calls"
        assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("add them", None)
        deltas = [event["choices"][0]["delta"] for event in streamed if event["choices"]]
        assert joined(streamed, "reasoning") == "add them" and any("tool_calls" in delta for delta in deltas)
        assert not joined(streamed, "content")

    run(scene)


@pytest.fixture(scope="module")
def compiler() -> Iterator[tuple[GrammarCompiler, Tokenizer]]:
    directory = Path(DEMO_MODEL)
    tokenizer = load_tokenizer(directory)
    assert tokenizer is not None
    made = GrammarCompiler(tokenizer, 600, eos_token_ids(directory))
    yield made, tokenizer
    made.close()


SCHEMA = {"name": "x", "schema": {"type": "array", "items": {"type": "integer"}}}
OPEN_CALL = '<tool_call>\n{"name": "'


@pytest.mark.parametrize(
    ("body", "good", "bad"),
    [
        ({"tools": [TOOL], "tool_choice": "required"}, CALL[4] + "{}", "no call"),
        ({"tools": [TOOL]}, "free text, then " + CALL[4] + "{", OPEN_CALL + "sub"),
        ({"response_format": {"type": "json_schema", "json_schema": SCHEMA}}, "[1, 2]", "1"),
        ({"tools": [TOOL], "response_format": {"type": "json_object"}}, '{"a": 1}', "text"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes", "maybe"),
    ],
)
@pytest.mark.parametrize(("template", "opener"), [(QWEN, "<think>"), (R1, "")])
def test_a_constraint_lets_the_model_think_first(
    compiler: tuple[GrammarCompiler, Tokenizer], body: Any, good: str, bad: str, template: str, opener: str
) -> None:
    """The constraint that the engine gets, with an opener of a call in the thought."""

    async def scene() -> None:
        engines = ScriptedEngines(["x"], template=template)
        await ask(engines, body)
        constraint = engines.asked[0].params.structured_outputs
        assert constraint is not None

        def allows(text: str) -> bool:
            tokens = compiler[1].encode(text, add_special_tokens=False)
            return num_allowed(compiler[0].compile(constraint).matcher(), tokens) == len(tokens)

        thought = f"{opener}\nMaybe {OPEN_CALL}sub? No: {{}}</think>\n\n"
        assert allows(thought + good) and not allows(thought + bad)
        assert allows(good) and not allows(bad) if opener else allows(bad), "without a thought"

    run(scene)


def test_with_thinking_off_a_constraint_begins_at_once() -> None:
    async def scene() -> None:
        engines = ScriptedEngines(["x"], template=QWEN)
        form = {"response_format": {"type": "json_object"}}
        await ask(engines, form | {"chat_template_kwargs": {"enable_thinking": False}})
        await ask(engines, form)
        starts = [request.params.structured_outputs.reasoning for request in engines.asked]  # type: ignore[union-attr]
        assert starts == ["none", "none", "optional", "optional"]

    run(scene)


def test_a_server_thinks_before_the_schema(tmp_path: Path) -> None:
    """The demo model never closes its thoughts: the schema, which would force a brace, does not apply to them."""
    model = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, model, ignore=shutil.ignore_patterns("adapters"))
    (model / "chat_template.jinja").write_text(R1)
    body = CHAT | {"temperature": 0, "max_tokens": 12, "response_format": {"type": "json_object"}}
    with serving(str(model)) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        answer = http.post(PATH, json=body).json()
        response = http.post("/v1/responses", json={"input": "two?", "max_output_tokens": 5, "temperature": 0}).json()
    (choice,) = answer["choices"]
    assert choice["message"]["content"] is None and choice["message"]["reasoning"].strip("{ \n")
    assert not choice["message"]["reasoning"].startswith("{"), "the schema does not reach the thoughts"
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 12
    assert [item["type"] for item in response["output"]] == ["reasoning"] and response["status"] == "incomplete"


def test_a_budget_ends_the_thoughts(served: Served) -> None:
    """The first tokens are those without a budget, with speculation and in every answer; then the model goes on."""
    asked = CHAT | {"chat_template": R1, "temperature": 0, "max_tokens": 30, "return_token_ids": True}

    def post(path: str = PATH, **fields: Any) -> Any:
        answer = httpx.post(served.url + path, json=asked | fields, timeout=600)
        assert answer.status_code == 200, answer.text
        return answer if fields.get("stream") else answer.json()

    closer = httpx.post(served.url + "/tokenize", json={"prompt": "</think>", "add_special_tokens": False}, timeout=600)
    ends = closer.json()["tokens"]
    (free,) = post(thinking_token_budget=-1)["choices"]
    assert free["message"]["content"] is None, "the demo model never closes its thoughts"
    for budget in (0, 4):
        answer = post(thinking_token_budget=budget, n=2)
        for choice in answer["choices"]:
            assert choice["token_ids"][: budget + len(ends)] == free["token_ids"][:budget] + ends
            assert choice["message"]["content"] and bool(budget) is bool(choice["message"].get("reasoning"))
    whole = answer["choices"][0]["message"]
    streamed = events(post(thinking_token_budget=4, stream=True).text)[:-1]
    assert (joined(streamed, "reasoning"), joined(streamed, "content")) == (whole["reasoning"], whole["content"])
    formed = post(thinking_token_budget=4, response_format={"type": "json_object"})["choices"][0]
    assert formed["message"]["reasoning"] == whole["reasoning"] and formed["message"]["content"].startswith("{")
    ignored = post(thinking_token_budget=4, chat_template=PLAIN)["choices"][0]
    assert ignored == post(chat_template=PLAIN)["choices"][0], "this template has no thoughts"
    body = {"input": CHAT["messages"], "chat_template": R1, "temperature": 0, "thinking_token_budget": 4}
    answer = httpx.post(served.url + "/v1/responses", json=body | {"max_output_tokens": 30}, timeout=600).json()
    assert answer["output"][0]["content"][0]["text"] == whole["reasoning"]
    assert answer["output"][1]["content"][0]["text"] == whole["content"]


@pytest.mark.parametrize(
    ("path", "body"),
    [(PATH, CHAT), ("/v1/responses", {"input": "a"}), ("/v1/completions", {"prompt": "a"})],
)
@pytest.mark.parametrize("wrong", [-2, "4", True, 1.5, 1 << 25])
def test_a_budget_is_a_number_of_tokens(path: str, body: dict[str, Any], wrong: Any) -> None:
    async def scene() -> None:
        engines = ScriptedEngines(["x"], template=R1)
        async with gateway(engines) as http:
            answer = await http.post(path, json=body | {"thinking_token_budget": wrong})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "thinking_token_budget"), answer.text
        assert not engines.asked

    run(scene)
