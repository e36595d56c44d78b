"""Chat requests with templates of adapters, several templates, and template variables of a client."""

import asyncio
from dataclasses import replace
from typing import Any

import httpx
import pytest
from sidestream.runtime.gateway.interfaces import AdapterCard
from sidestream.runtime.text.chat_files import ChatTemplates
from support.gateway import FakeEngines, gateway

SAID = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
PARTS = "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
TOOL_USE = "<tool_call>{{ tools | length }}" + SAID
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
HELLO: Any = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "max_tokens": 2}
ROUTES = ("/v1/chat/completions", "/v1/responses", "/tokenize")


class TemplateEngines(FakeEngines):
    """`own`: adapters' own templates; `read`: the names for which they were asked."""

    def __init__(self, templates: dict[str, str], own: dict[str, dict[str, str]] | None = None) -> None:
        super().__init__()
        self.info = replace(self.info, templates=ChatTemplates(templates, {"eos_token": "</s>"}))
        self.own, self.read = own or {}, list[str]()
        self.cards = [AdapterCard(name, 8, "aa", chat_template=f"digest of {name}") for name in self.own]
        self.cards += [AdapterCard("plain", 8, "bb"), AdapterCard("offered", 8, "", chat_template=None)]

    async def chat_templates(self, name: str) -> ChatTemplates:
        self.read.append(name)
        return ChatTemplates(self.own.get(name, {}), {"bos_token": "<own>"})


async def prompt(engines: FakeEngines, http: httpx.AsyncClient, body: dict[str, Any]) -> str:
    answer = await http.post("/v1/chat/completions", json=HELLO | body)
    assert answer.status_code == 200, answer.text
    return str(engines.asked[-1].prompt)


def test_an_adapters_own_template_is_used_for_it_at_each_endpoint() -> None:
    own = {"mine": {"default": "{{ bos_token }}mine{{ eos_token }}" + PARTS}}
    engines = TemplateEngines({"default": SAID}, own)

    async def run() -> None:
        async with gateway(engines) as http:
            for name, said in (("base", "<user>hi"), ("plain", "<user>hi"), ("offered", "<user>hi")):
                assert await prompt(engines, http, {"model": name}) == said
            mine = "<own>mine</s><user>hi"
            for _ in range(2):
                assert await prompt(engines, http, {"model": "mine"}) == mine
            await http.post("/v1/responses", json={"model": "mine", "input": "hi"})
            assert engines.asked[-1].prompt == mine
            body = {"model": "mine", "messages": HELLO["messages"], "max_tokens": 2}
            assert (await http.post("/v1/messages", json=body)).status_code == 200
            assert engines.asked[-1].prompt == mine
            ids = (await http.post("/tokenize", json={"model": "mine", "messages": HELLO["messages"]})).json()["tokens"]
            assert "".join(map(chr, ids)) == mine
            assert engines.read == ["offered", "mine"], "what an engine has read is asked for once"

    asyncio.run(run())


@pytest.mark.parametrize("route", ROUTES)
def test_default_variables_are_those_that_a_request_does_not_set(route: str) -> None:
    engines = TemplateEngines({"default": "{{ mood }} {{ style }}:" + SAID})
    text = HELLO["messages"][0]["content"][0]["text"]
    body = {"input": text} if route == "/v1/responses" else {"messages": [{"role": "user", "content": text}]}

    async def run() -> list[str]:
        said = []
        async with gateway(engines, template_variables={"mood": "calm", "style": "terse"}) as http:
            for given in ({}, {"chat_template_kwargs": {"style": "long"}}, {"chat_template_kwargs": None}):
                answer = await http.post(route, json=body | given)
                assert answer.status_code == 200, answer.text
                ids = answer.json()["tokens"] if route == "/tokenize" else None
                said.append("".join(map(chr, ids)) if ids else str(engines.asked[-1].prompt))
        return said

    assert asyncio.run(run()) == ["calm terse:<user>hi", "calm long:<user>hi", "calm terse:<user>hi"]


def test_a_base_model_without_a_template_and_an_adapter_with_one() -> None:
    engines = TemplateEngines({}, {"mine": {"default": SAID}})

    async def run() -> None:
        async with gateway(engines) as http:
            assert await prompt(engines, http, {"model": "mine"}) == "<user>hi"
            for name in ("base", "plain"):
                answer = await http.post("/v1/chat/completions", json=HELLO | {"model": name})
                assert answer.status_code == 400 and "--chat-template" in answer.json()["error"]["message"]

    asyncio.run(run())


def test_a_request_may_have_its_own_template_or_name_one() -> None:
    named = {"default": SAID, "short": "short" + PARTS}
    engines = TemplateEngines(named, {"mine": {"default": "mine"}})
    own = {"chat_template": "{{ eos_token }}own" + PARTS}

    async def run() -> None:
        async with gateway(engines) as http:
            assert await prompt(engines, http, own) == "</s>own<user>hi"
            assert await prompt(engines, http, own | {"model": "mine"}) == "</s>own<user>hi"
            assert await prompt(engines, http, {"chat_template": "short"}) == "short<user>hi"
            for nothing in (None, ""):
                assert await prompt(engines, http, {"chat_template": nothing}) == "<user>hi"
            await http.post("/v1/responses", json={"input": "hi"} | own)
            assert engines.asked[-1].prompt == "</s>own<user>hi"
            ids = (await http.post("/tokenize", json={"messages": HELLO["messages"]} | own)).json()["tokens"]
            assert "".join(map(chr, ids)) == "</s>own<user>hi"
            count = len(engines.asked)
            for hostile, words in (
                ("{% for i in range(9**9) %}{{ 'x' * 9999 }}{% endfor %}", "chat template failed"),
                ("{{ ''.__class__.__mro__ }}", "chat template failed"),
                ("{% if %}", "chat template failed"),
                ("x" * (1 << 19), "chat_template"),
            ):
                answer = await http.post("/v1/chat/completions", json=HELLO | {"chat_template": hostile})
                assert answer.status_code == 400 and words in answer.json()["error"]["message"], hostile[:50]
            assert len(engines.asked) == count
            tools = await http.post("/v1/chat/completions", json=HELLO | own | {"tools": TOOLS})
            assert tools.json()["error"]["param"] == "tools", "the template has no format for them"

    asyncio.run(run())


@pytest.mark.parametrize("model", ["base", "mine"])
def test_tools_choose_the_template_and_how_calls_are_spelled(model: str) -> None:
    """The template without tools speaks of none."""
    named = {"default": SAID, "tool_use": TOOL_USE}
    engines = TemplateEngines(named if model == "base" else {"default": SAID}, {"mine": named})

    async def run() -> None:
        async with gateway(engines) as http:
            asked = {"model": model, "tools": TOOLS}
            assert await prompt(engines, http, asked) == "<tool_call>1<user>hi"
            constraint = engines.asked[-1].params.structured_outputs
            assert constraint is not None and "<tool_call>" in str(constraint.grammar)
            assert await prompt(engines, http, asked | {"tool_choice": "none"}) == "<user>hi"
            assert await prompt(engines, http, {"model": model}) == "<user>hi"
            if model == "mine":
                answer = await http.post("/v1/chat/completions", json=HELLO | {"model": "base", "tools": TOOLS})
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")

    asyncio.run(run())


RESERVED = ("messages", "tools", "add_generation_prompt", "chat_template", "tokenize")
NAMES = (*RESERVED, "seconds", "self", "template", "bos_token", "eos_token", "range", "namespace", "raise_exception",
         "documents", "limit", "loop", "a b", "")  # fmt: skip


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/tokenize"])
def test_no_variable_of_a_client_is_a_fault(endpoint: str) -> None:
    engines = TemplateEngines({"default": SAID + "{{ eos_token }}{% for i in range(1) %}{% endfor %}"})
    hello = {"messages": HELLO["messages"]}

    async def run() -> None:
        async with gateway(engines) as http:
            for name in NAMES:
                for value in (1e-9, -1, 1e300, "x", None, [], {"a": [1]}, True):
                    answer = await http.post(endpoint, json=hello | {"chat_template_kwargs": {name: value}})
                    assert answer.status_code in (200, 400), answer.text
                    if name in RESERVED:
                        error = answer.json()["error"]
                        assert answer.status_code == 400 and error["param"] == "chat_template_kwargs"
                        assert repr(name) in error["message"]
            nested = "[" * 500 + "]" * 500
            body = '{"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"a": ' + nested + "}}"
            answer = await http.post(endpoint, content=body, headers={"content-type": "application/json"})
            assert answer.status_code in (200, 400), answer.text
            assert (await http.post(endpoint, json=hello)).status_code == 200

    asyncio.run(run())
