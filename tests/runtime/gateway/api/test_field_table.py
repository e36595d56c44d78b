"""Fields of other projects' bodies: each is supported, accepted without an effect, or refused with a remedy, as
docs/http_fields.md says.
"""

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from sidestream.runtime.api.unsupported import ANY
from sidestream.runtime.gateway.api.chat.request import ChatRequest
from sidestream.runtime.gateway.api.completions import CompletionRequest
from sidestream.runtime.gateway.api.field_table import ENDPOINTS, ROWS, Row
from sidestream.runtime.gateway.api.responses.request import ResponseRequest
from sidestream.runtime.text.chat_files import ChatTemplates
from sidestream.tools.dev.pages.field_rows import field_rows
from support.body_fields import FIELDS
from support.gateway import FakeEngines, gateway

PAGE = (Path(__file__).parents[4] / "docs" / "http_fields.md").read_text()
BODIES: dict[str, tuple[str, type, dict[str, Any]]] = {
    "completions": ("/v1/completions", CompletionRequest, {"prompt": "x", "max_tokens": 1}),
    "chat": ("/v1/chat/completions", ChatRequest, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
    "responses": ("/v1/responses", ResponseRequest, {"input": "x", "max_output_tokens": 1}),
}
CASES = [(row, name, endpoint) for row in ROWS for name in row.names.split() for endpoint in row.endpoints]


def declared(endpoint: str) -> set[str]:
    """The fields that a body has without the table."""
    body: Any = BODIES[endpoint][1]
    return set(body.__bases__[0].__struct_fields__)


def post_all(endpoint: str, bodies: list[dict[str, Any]]) -> list[httpx.Response]:
    async def scene() -> list[httpx.Response]:
        path, _, body = BODIES[endpoint]
        async with gateway(FakeEngines()) as http:
            return [await http.post(path, json=body | fields) for fields in bodies]

    return asyncio.run(scene())


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_each_field_of_the_other_projects_is_known(endpoint: str) -> None:
    table = {name for _, name, where in CASES if where == endpoint}
    assert FIELDS[endpoint] - declared(endpoint) - table == set(), "neither supported nor in the table"
    assert table & declared(endpoint) == set(), "supported, so that it must leave the table"


def test_a_name_has_one_row() -> None:
    names = [name for row in ROWS for name in row.names.split()]
    assert len(names) == len(set(names))


def test_the_page_has_the_table() -> None:
    text = PAGE.partition("<!-- table: fields of HTTP bodies -->\n")[2].partition("<!-- end -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.strip().splitlines()[2:]]
    assert rows == [list(row) for row in field_rows()]
    in_page = {
        (name, endpoint)
        for names, endpoints, _, _ in rows
        for name in re.findall("`([^`]+)`", names)
        for endpoint in (ENDPOINTS if endpoints == "all" else endpoints.split(", "))
    }
    assert in_page == {(name, endpoint) for _, name, endpoint in CASES}


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_null_and_values_without_an_effect_are_accepted(endpoint: str) -> None:
    bodies: list[dict[str, Any]] = []
    for row, name, where in CASES:
        if where == endpoint:
            accepted = [{"any": [1, None]}, True, "x"] if ANY in row.option.accepted else [*row.option.accepted]
            bodies += [{name: value} for value in [None, *accepted]]
    for body, answer in zip(bodies, post_all(endpoint, bodies), strict=True):
        assert answer.status_code == 200, (body, answer.text)
    everything = {name: None for _, name, where in CASES if where == endpoint}
    assert post_all(endpoint, [everything])[0].status_code == 200


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_values_with_an_effect_are_refused_with_the_remedy(endpoint: str) -> None:
    def refused(row: Row) -> bool:
        return ANY not in row.option.accepted

    cases = [(row, name) for row, name, where in CASES if where == endpoint and refused(row)]
    bodies = [{name: value} for _, name in cases for value in (7, {"a": 1})]
    remedies = [(row, name) for row, name in cases for _ in range(2)]
    for (row, name), answer in zip(remedies, post_all(endpoint, bodies), strict=True):
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, name, "unsupported_parameter"), error
        remedy = row.option.remedy
        if endpoint == "responses":
            remedy = remedy.replace("max_tokens", "max_output_tokens")
        assert error["message"] == f"{name} is not supported; {remedy}"


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_other_fields_are_named(endpoint: str) -> None:
    for field, answer in zip(
        ("temprature", "zz_top"), post_all(endpoint, [{"temprature": 1}, {"zz_top": None}]), strict=True
    ):
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, field) and "there is no field" in error["message"]


def test_best_of_may_repeat_n() -> None:
    accepted, refused = post_all("completions", [{"n": 2, "best_of": 2}, {"n": 2, "best_of": 5}])
    assert accepted.status_code == 200 and len(accepted.json()["choices"]) == 2
    assert refused.status_code == 400 and "use n" in refused.json()["error"]["message"]


GENERATION: dict[str, Any] = {
    "ignore_eos": True, "repetition_penalty": 1.25, "min_tokens": 2, "stop_token_ids": [4], "frequency_penalty": 0.5,
    "presence_penalty": -0.5, "seed": 9, "temperature": 0.25, "top_p": 0.75, "top_k": 6, "min_p": 0.125,
    "skip_special_tokens": False, "include_stop_str_in_output": True, "allowed_token_ids": [3, 4],
    "bad_words": ["no"], "speculation": "off",
}  # fmt: skip


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_the_sampling_fields_are_the_same_at_each_endpoint(endpoint: str) -> None:
    path, _, body = BODIES[endpoint]
    more = {
        "stop": ["END", "STOP"], "logit_bias": {"5": 1.5}, "deadline_seconds": 30.0, "priority": 3,
        "structured_outputs": {"choice": ["a", "b"]}, "model": "pirate",
    }  # fmt: skip

    async def scene() -> None:
        engines = FakeEngines()
        async with gateway(engines) as http:
            answer = await http.post(path, json=body | {"max_tokens": 3} | GENERATION | more)
            if endpoint == "responses":
                assert answer.status_code == 400, "max_tokens has another name here"
                answer = await http.post(path, json=body | {"max_output_tokens": 3} | GENERATION | more)
        assert answer.status_code == 200, answer.text
        (request,) = engines.asked
        for name, value in GENERATION.items():
            assert getattr(request.params, name) == (tuple(value) if isinstance(value, list) else value), name
        assert request.params.stop_strings == ("END", "STOP") and request.params.biases == {5: 1.5}
        assert request.params.max_tokens == 3 and request.params.structured_outputs is not None
        assert (request.adapter, request.priority) == ("pirate", 3)
        assert request.deadline_seconds == 30.0

    asyncio.run(scene())


def test_errors_of_responses_have_their_own_names() -> None:
    wrong = [
        {"min_tokens": 5, "max_output_tokens": 4},
        {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}},
        {"stop": [""]},
    ]
    said = [answer.json()["error"] for answer in post_all("responses", wrong)]
    assert said[0]["param"] == "min_tokens" and "exceeds max_output_tokens=4" in said[0]["message"]
    assert "text.format and structured_outputs exclude each other" in said[1]["message"]
    assert said[2]["param"] == "stop[0]"


def test_variables_of_the_chat_template_have_fields_of_their_own() -> None:
    template = "{{ reasoning_effort }},{{ enable_thinking }},{{ documents[0].title if documents }},{{ mood }}"
    bodies: list[tuple[str, dict[str, Any], str]] = [
        ("/v1/chat/completions", {"reasoning_effort": "low"}, "low,,,"),
        ("/v1/chat/completions", {"reasoning_effort": "none", "documents": [{"title": "T"}]}, "none,False,T,"),
        (
            "/v1/chat/completions",
            {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False, "mood": "m"}},
            "high,False,,m",
        ),
        ("/v1/responses", {"chat_template_kwargs": {"mood": "m"}}, ",,,m"),
    ]

    async def scene() -> None:
        engines = FakeEngines()
        engines.info = replace(engines.info, templates=ChatTemplates({"default": template}))
        async with gateway(engines) as http:
            for path, fields, prompt in bodies:
                body = BODIES["chat" if "chat" in path else "responses"][2]
                answer = await http.post(path, json=body | fields)
                assert answer.status_code == 200, answer.text
                assert engines.asked[-1].prompt == prompt
            wrong = await http.post("/v1/chat/completions", json=BODIES["chat"][2] | {"reasoning_effort": "huge"})
        assert wrong.status_code == 400 and "'minimal'" in wrong.json()["error"]["message"]

    asyncio.run(scene())


@pytest.mark.parametrize(("given", "added"), [(None, (True, False)), (True, (True, True)), (False, (False, False))])
def test_special_tokens_can_be_added_or_left_out(given: bool | None, added: tuple[bool, bool]) -> None:
    async def scene() -> None:
        engines = FakeEngines()
        async with gateway(engines) as http:
            for endpoint in ("completions", "chat"):
                path, _, body = BODIES[endpoint]
                answer = await http.post(path, json=body | {"add_special_tokens": given})
                assert answer.status_code == 200, answer.text
            scored = {"echo": True, "logprobs": 1, "add_special_tokens": given}
            echoed = await http.post("/v1/completions", json=BODIES["completions"][2] | scored)
        assert tuple(request.add_special_tokens for request in engines.asked[:2]) == added
        assert echoed.status_code == 200

    asyncio.run(scene())
