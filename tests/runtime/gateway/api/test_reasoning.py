"""Reasoning apart from content in chats: whole, streamed, before calls and schemas, as template and body say."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from sidestream.runtime.demo_model import DEMO_MODEL
from sidestream.runtime.text.generation_config import eos_token_ids
from sidestream.runtime.text.structured.grammar_compiler import GrammarCompiler
from sidestream.runtime.text.tokenizer import Tokenizer, load_tokenizer
from support.gateway import events, gateway
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
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": "Five.", "refusal": None}
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
