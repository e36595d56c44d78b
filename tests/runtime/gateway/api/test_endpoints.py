"""The endpoints over fake engines, without sockets: bodies, statuses, usage."""

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from sidestream.runtime.api.errors import DeadlineError, EngineDeadError, OverloadedError, RequestError, ServerError
from sidestream.runtime.gateway.interfaces import AdapterCard, GatewayHealth
from support.gateway import Books, FakeEngines, events, gateway

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def run(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), 120))


def test_several_prompts_with_several_completions_each_are_answered_in_order() -> None:
    async def scene() -> None:
        engines, books = FakeEngines(), Books()
        async with gateway(engines, books) as http:
            whole = await http.post(
                "/v1/completions", json={"prompt": ["xy", "z"], "n": 2, "max_tokens": 3, "echo": True}
            )
            body = {"prompt": ["xy", "z"], "n": 2, "max_tokens": 3, "echo": True, "stream": True}
            streamed = await http.post("/v1/completions", json=body | {"stream_options": {"include_usage": True}})
        texts = [choice["text"] for choice in whole.json()["choices"]]
        assert texts == ["xya b c ", "xya b c ", "za b c ", "za b c "]
        assert [choice["index"] for choice in whole.json()["choices"]] == [0, 1, 2, 3]
        *chunks, last, done = events(streamed.text)
        assert done == "[DONE]" and last["choices"] == []
        assert last["usage"] == whole.json()["usage"]
        assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (3, 12)
        grown = ["", "", "", ""]
        for chunk in chunks:
            assert chunk["usage"] is None
            for choice in chunk["choices"]:
                grown[choice["index"]] += choice["text"]
        assert grown == texts
        assert [record.output_tokens for record in books.records] == [12, 12]
        assert [record.prompt_tokens for record in books.records] == [3, 3]
        assert len({request.request_id for request in engines.asked}) == 4

    run(scene)


def test_fields_reach_the_engine_as_sampling_parameters() -> None:
    async def scene() -> None:
        engines = FakeEngines()
        fields = {
            "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": -3, "n": 2, "min_tokens": 1,
            "ignore_eos": True, "presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.5,
            "stop_token_ids": [5], "include_stop_str_in_output": True, "skip_special_tokens": False,
        }  # fmt: skip
        more = {"stop": "END", "logit_bias": {"7": -100}, "max_tokens": 9, "max_completion_tokens": 3, "priority": -2}
        async with gateway(engines) as http:
            answer = await http.post("/v1/chat/completions", json=CHAT | fields | more | {"model": "pirate"})
        assert answer.status_code == 200 and answer.json()["model"] == "pirate"
        (request,) = engines.asked
        for name, value in fields.items():
            assert getattr(request.params, name) == (tuple(value) if isinstance(value, list) else value), name
        assert request.params.max_tokens == 3 and request.params.biases == {7: -100.0}
        assert request.params.stop_strings == ("END",)
        assert (request.adapter, request.priority, request.prompt) == ("pirate", -2, "<user>hi<assistant>")

    run(scene)


@pytest.mark.parametrize(
    ("path", "change", "field"),
    [
        ("/v1/completions", {"temperature": -1}, "temperature"),
        ("/v1/completions", {"temperature": "hot"}, "temperature"),
        ("/v1/completions", {"n": 0}, "n"),
        ("/v1/completions", {"n": True}, "n"),
        ("/v1/completions", {"min_tokens": 20, "max_tokens": 5}, "min_tokens"),
        ("/v1/completions", {"logit_bias": {"x": 1}}, "logit_bias"),
        ("/v1/completions", {"temprature": 1}, "temprature"),
        ("/v1/completions", {"prompt": [1, "a"]}, "prompt"),
        ("/v1/completions", {"best_of": 3}, "best_of"),
        ("/v1/completions", {"stream_options": {"include_usage": True}}, "stream_options"),
        ("/v1/chat/completions", {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ("/v1/chat/completions", {"tool_choice": "required"}, "tool_choice"),
        ("/v1/chat/completions", {"response_format": {"type": "json_schema"}}, "response_format"),
        ("/v1/chat/completions", {"top_logprobs": 2}, "top_logprobs"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("/v1/chat/completions", {"messages": [{"role": "the king", "content": ""}]}, "messages[0].role"),
        ("/v1/responses", {"previous_response_id": "resp_1"}, "previous_response_id"),
        ("/v1/responses", {"text": {"format": {"type": "json_schema"}}}, "text.format"),
    ],
)
def test_a_fault_in_the_body_is_named(path: str, change: dict[str, Any], field: str) -> None:
    async def scene() -> None:
        engines = FakeEngines()
        body = {"/v1/completions": {"prompt": "x"}, "/v1/chat/completions": CHAT, "/v1/responses": {"input": "x"}}[path]
        async with gateway(engines) as http:
            answer = await http.post(path, json=body | change)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["type"]) == (400, field, "invalid_request_error")
        assert not engines.asked

    run(scene)


def test_what_asks_for_nothing_is_taken() -> None:
    async def scene() -> None:
        asked = {"response_format": {"type": "text"}, "tool_choice": "none", "tools": [], "user": "u", "store": True}
        async with gateway(FakeEngines()) as http:
            answer = await http.post("/v1/chat/completions", json=CHAT | asked | {"n": None, "audio": None})
        assert answer.status_code == 200, answer.text

    run(scene)


@pytest.mark.parametrize(
    ("problem", "status", "code", "again"),
    [
        (EngineDeadError("gone at ipc:///secret", "engine_dead", 5.0), 503, "engine_dead", "5"),
        (OverloadedError("too many", "overloaded", 1.0), 429, "overloaded", "1"),
        (OverloadedError("it loads", "loading", 0.2), 503, "loading", "1"),
        (OverloadedError("it stops", "draining"), 503, "draining", "1"),
        (DeadlineError("too late", "deadline_exceeded"), 504, "deadline_exceeded", None),
        (ServerError("no such adapter", "unknown_adapter"), 404, "model_not_found", None),
        (ServerError("it failed", "request_failed"), 500, "request_failed", None),
        (RequestError("stop_token_ids names token 900"), 400, None, None),
        (ZeroDivisionError("a fault of ours, with /a/path"), 500, "internal_error", None),
    ],
)
def test_what_goes_wrong_at_an_engine_has_its_status(
    problem: Exception, status: int, code: str | None, again: str | None
) -> None:
    async def scene() -> None:
        engines, books = FakeEngines(), Books()
        engines.problem = lambda request: problem
        async with gateway(engines, books) as http:
            for stream in (False, True):
                answer = await http.post("/v1/completions", json={"prompt": ["x", "y"], "stream": stream})
                assert (answer.status_code, answer.headers.get("retry-after")) == (status, again)
                assert answer.json()["error"]["code"] == code
                assert "secret" not in answer.text and "/a/path" not in answer.text
        assert [record.status for record in books.records] == [status, status]

    run(scene)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_what_goes_wrong_in_the_middle_ends_the_stream_with_an_error(path: str) -> None:
    async def scene() -> None:
        engines, books = FakeEngines(), Books()
        engines.late = EngineDeadError("died", "engine_dead", 5.0)
        body = {"/v1/completions": {"prompt": "x"}, "/v1/chat/completions": CHAT, "/v1/responses": {"input": "x"}}[path]
        async with gateway(engines, books) as http:
            answer = await http.post(path, json=body | {"stream": True})
        last = events(answer.text)[-1]
        error = last["response"]["error"] if path == "/v1/responses" else last["error"]
        assert answer.status_code == 200 and error["code"] == "engine_dead" and "b " in answer.text
        assert [(record.status, record.output_tokens) for record in books.records] == [(503, 2)]

    run(scene)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("completions", {"prompt": "x", "logprobs": 21}, "logprobs"),
        ("completions", {"prompt": "x", "logprobs": -1}, "logprobs"),
        ("completions", {"prompt": "x", "prompt_logprobs": 100}, "prompt_logprobs"),
        ("chat/completions", CHAT | {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ("responses", {"input": "x", "top_logprobs": 100}, "top_logprobs"),
    ],
)
def test_more_log_probabilities_need_a_larger_limit_of_the_server(path, body, field) -> None:
    async def scene() -> None:
        engines = FakeEngines()
        async with gateway(engines) as http:
            refused = (await http.post(f"/v1/{path}", json=body)).json()["error"]
            count = 256 if body[field] == -1 else body[field]
            assert (
                refused["param"] == field
                and f"give 0 to 20, or start the server with --max-logprobs {count}" in (refused["message"])
            )
            engines.info = dataclasses.replace(engines.info, max_logprobs=count)
            assert (await http.post(f"/v1/{path}", json=body)).status_code == 200
            echoed = await http.post("/v1/completions", json={"prompt": "x", "echo": True, "logprobs": count})
            assert echoed.status_code == 200
        params = engines.asked[0].params
        assert (params.prompt_logprobs if field == "prompt_logprobs" else params.logprobs) == body[field]

    run(scene)


def test_log_probabilities_have_both_spellings() -> None:
    async def scene() -> None:
        engines = FakeEngines()
        async with gateway(engines) as http:
            plain = await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2, "logprobs": 2})
            chat = CHAT | {"max_tokens": 2, "logprobs": True, "top_logprobs": 1}
            whole = await http.post("/v1/chat/completions", json=chat)
            streamed = await http.post("/v1/chat/completions", json=chat | {"stream": True})
        told = plain.json()["choices"][0]["logprobs"]
        assert told["tokens"] == ["a ", "b "] and told["text_offset"] == [0, 2]
        assert told["top_logprobs"] == [{"a ": -0.5, "b ": -1.5}, {"b ": -0.5, "c ": -1.5}]
        places = whole.json()["choices"][0]["logprobs"]["content"]
        assert [place["token"] for place in places] == ["a ", "b "] and places[0]["bytes"] == [97, 32]
        assert [len(place["top_logprobs"]) for place in places] == [1, 1]
        grown = [
            place
            for event in events(streamed.text)[:-1]
            for choice in event["choices"]
            if choice["logprobs"]
            for place in choice["logprobs"]["content"]
        ]
        assert grown == places

    run(scene)


def test_a_responses_stream_is_the_sequence_of_events_that_ends_with_the_whole() -> None:
    async def scene() -> None:
        async with gateway(FakeEngines()) as http:
            body = {"input": [{"role": "user", "content": "hi"}], "instructions": "be brief", "metadata": {"k": "v"}}
            streamed = events((await http.post("/v1/responses", json=body | {"stream": True})).text)
            whole = (await http.post("/v1/responses", json=body)).json()
        assert [event["sequence_number"] for event in streamed] == list(range(len(streamed)))
        assert streamed[0]["type"] == "response.created" and streamed[-1]["type"] == f"response.{whole['status']}"
        deltas = [event["delta"] for event in streamed if event["type"] == "response.output_text.delta"]
        assert "".join(deltas) == "a b c d " == whole["output"][0]["content"][0]["text"]
        last = streamed[-1]["response"]
        changing = {"id", "output", "created_at"}
        assert {k: v for k, v in last.items() if k not in changing} == {
            k: v for k, v in whole.items() if k not in changing
        }

    run(scene)


def test_models_are_the_base_and_the_adapters_that_the_caller_may_use() -> None:
    async def scene() -> None:
        books = Books()
        books.hidden = {"shout"}
        async with gateway(FakeEngines(), books) as http:
            cards = {card["id"]: card for card in (await http.get("/v1/models")).json()["data"]}
            one = await http.get("/v1/models/pirate")
            hidden = await http.get("/v1/models/shout")
            missing = await http.get("/v1/models/nobody")
            refused = await http.post("/v1/completions", json={"prompt": "x", "model": "shout"})
        assert set(cards) == {"base", "pirate"} and cards["pirate"]["parent"] == "base"
        assert one.json() == cards["pirate"]
        assert hidden.status_code == missing.status_code == refused.status_code == 404
        assert hidden.json()["error"]["code"] == "model_not_found"
        assert hidden.text.replace("shout", "nobody") == missing.text, "as if it did not exist"
        assert "(there are: base, pirate)" in refused.json()["error"]["message"], "names that the caller may use"

    run(scene)


def test_an_unknown_model_is_answered_with_a_few_names() -> None:
    async def scene() -> None:
        engines = FakeEngines()
        engines.cards = [AdapterCard(f"a{number}", 8, "") for number in range(100)]
        async with gateway(engines) as http:
            answer = await http.post("/v1/completions", json={"prompt": "x", "model": "a100"})
        message = answer.json()["error"]["message"]
        assert "'a100' does not exist (there are: base, a0, a1, a2, a3 and 96 more); /v1/models lists all" in message

    run(scene)


def test_further_names_of_the_base_model() -> None:
    async def scene() -> None:
        engines = FakeEngines()
        async with gateway(engines, model_aliases=["gpt-4o", "org/base"]) as http:
            cards = (await http.get("/v1/models")).json()["data"]
            for name in ("base", "gpt-4o", "org/base"):
                answer = await http.post("/v1/completions", json={"prompt": "x", "model": name, "max_tokens": 1})
                assert answer.status_code == 200 and answer.json()["model"] == "base"
                assert (await http.get(f"/v1/models/{name}")).json()["id"] == name
            taken = await http.post("/v1/load_lora_adapter", json={"lora_name": "gpt-4o", "lora_path": "/a"})
        assert [card["id"] for card in cards][:3] == ["base", "gpt-4o", "org/base"] and taken.status_code == 400
        assert [request.adapter for request in engines.asked] == [None] * 3

    run(scene)


def test_adapters_come_and_go_by_an_admin_only() -> None:
    async def scene() -> None:
        engines = FakeEngines()
        load = {"lora_name": "sql", "lora_path": "/adapters/sql"}
        async with gateway(engines) as http:
            assert (await http.post("/v1/load_lora_adapter", json=load)).status_code == 200
            assert (await http.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})).status_code == 200
            base = await http.post("/v1/load_lora_adapter", json=load | {"lora_name": "base"})
            assert base.status_code == 400
        assert engines.calls == [("load", "sql", "/adapters/sql", False), ("unload", "sql")]

        class Users(Books):
            def identify(self, authorization: str | None, client_host: str) -> Any:
                from sidestream.runtime.gateway.interfaces import Caller

                return Caller("user")

        async with gateway(engines, Users()) as http:
            refused = await http.post("/v1/load_lora_adapter", json=load)
        assert refused.status_code == 403 and len(engines.calls) == 2

    run(scene)


def test_everything_but_probes_and_documents_needs_the_key() -> None:
    async def scene() -> None:
        async with gateway(FakeEngines(), Books("secret")) as http:
            for path in ("/v1/models", "/version", "/metrics", "/nowhere"):
                answer = await http.get(path)
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key"), path
                wrong = await http.get(path, headers={"Authorization": "Bearer secre"})
                assert wrong.status_code == 401
                right = await http.get(path, headers={"Authorization": "bearer secret"})
                assert right.status_code == (404 if path == "/nowhere" else 200)
            for path in ("/health", "/ready", "/docs", "/openapi.json"):
                assert (await http.get(path)).status_code == 200, path

    run(scene)


@pytest.mark.parametrize(
    ("status", "health", "ready"),
    [("ok", 200, 200), ("stalled", 200, 200), ("loading", 200, 503), ("draining", 200, 503), ("dead", 503, 503)],
)
def test_health_and_readiness(status: Any, health: int, ready: int) -> None:
    async def scene() -> None:
        engines = FakeEngines()
        engines.status = GatewayHealth(status)
        async with gateway(engines) as http:
            assert (await http.get("/health")).status_code == health
            assert (await http.get("/ready")).status_code == ready

    run(scene)


def test_tokens_and_texts() -> None:
    async def scene() -> None:
        async with gateway(FakeEngines()) as http:
            text = await http.post("/tokenize", json={"prompt": "ab"})
            bare = await http.post("/tokenize", json={"prompt": "ab", "add_special_tokens": False})
            chat = await http.post("/tokenize", json=CHAT)
            both = await http.post("/tokenize", json=CHAT | {"prompt": "x"})
            back = await http.post("/detokenize", json={"tokens": [97, 98]})
        assert text.json() == {"count": 3, "max_model_len": 4096, "tokens": [1, 97, 98]}
        assert bare.json()["tokens"] == [97, 98]
        assert chat.json()["count"] == len("<user>hi<assistant>"), "the template says what the special tokens are"
        assert both.status_code == 400 and back.json() == {"prompt": "ab"}

    run(scene)


def test_a_key_s_limit_shortens_the_answer_and_its_headers_are_told() -> None:
    async def scene() -> None:
        engines = FakeEngines()
        async with gateway(engines, Books(limit=2)) as http:
            answer = await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 9, "min_tokens": 5})
            streamed = await http.post("/v1/completions", json={"prompt": "x", "stream": True})
        assert answer.json()["usage"]["completion_tokens"] == 2
        assert answer.headers["x-ratelimit-limit-requests"] == streamed.headers["x-ratelimit-limit-requests"] == "9"

    run(scene)


def test_request_ids_are_taken_given_and_never_trusted() -> None:
    async def scene() -> None:
        engines = FakeEngines()
        async with gateway(engines) as http:
            own = await http.get("/version", headers={"X-Request-Id": "mine-1"})
            odd = await http.get("/version", headers={"X-Request-Id": "x" * 65})
            twice = [
                http.post("/v1/completions", json={"prompt": "x"}, headers={"X-Request-Id": "same"}) for _ in range(2)
            ]
            answers = await asyncio.gather(*twice)
        assert own.headers["x-request-id"] == "mine-1"
        assert 8 <= len(odd.headers["x-request-id"]) <= 64
        assert [answer.status_code for answer in answers] == [200, 200]
        first, second = engines.asked
        assert first.request_id != second.request_id

    run(scene)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_aborts_its_request(stream: bool) -> None:
    async def scene() -> None:
        engines, books = FakeEngines(), Books()
        engines.gate.clear()
        async with gateway(engines, books) as http:
            asked = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x", "stream": stream}))
            while not engines.asked:
                await asyncio.sleep(0.001)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
        assert engines.left == [engines.asked[0].request_id]
        assert [record.status for record in books.records] == [499]

    run(scene)
