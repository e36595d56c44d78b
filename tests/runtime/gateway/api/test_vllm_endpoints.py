"""Endpoints and options of vLLM: batches of chats, rendered prompts, /invocations, /load, metrics of a request."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import pytest
from msgspec import structs
from sidestream.runtime.api.errors import ServerError
from sidestream.runtime.gateway.auth.admission import NoAuth
from sidestream.runtime.gateway.interfaces import EngineRequest
from sidestream.runtime.gateway.metrics.load_report import FORMAT_HEADER
from support.gateway import Books, FakeEngines, events, gateway
from support.live_server import Served
from support.scripted import ScriptedEngines

BATCH, CHAT = "/v1/chat/completions/batch", "/v1/chat/completions"
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
ITALY = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is the capital of Italy?"}]


def run(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), 120))


def post(served: Served, path: str, body: dict[str, Any]) -> Any:
    answer = httpx.post(served.url + path, json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_batch_answers_what_single_chats_do(served: Served) -> None:
    color = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "c", "schema": color}}
    options = {"temperature": 0, "max_tokens": 12, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    for more in ({}, {"model": "pirate"}, {"response_format": form}):
        body = {"model": "demo_model"} | options | more
        batch = post(served, BATCH, {"messages": [FRANCE, ITALY]} | body)
        single = [post(served, CHAT, {"messages": each} | body) for each in (FRANCE, ITALY)]
        wanted = [each["choices"][0] | {"index": index} for index, each in enumerate(single)]
        assert batch["choices"] == wanted
        for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert batch["usage"][count] == sum(each["usage"][count] for each in single)


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"stream": True}, "stream"),
        ({"n": 2}, "n"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"messages": []}, "messages"),
        ({"messages": [FRANCE, []]}, "messages[1]"),
        ({"messages": FRANCE}, "messages[0]"),
        ({"messages": [FRANCE, [{"role": "user", "content": "x", "audio": {"id": 1}}]]}, "messages[0].audio"),
        ({"model": "nobody"}, "model"),
    ],
)
def test_a_batch_that_cannot_be_answered_names_the_field(given: dict[str, Any], param: str) -> None:
    async def scene() -> None:
        engines, books = FakeEngines(), Books()
        async with gateway(engines, books) as http:
            answer = await http.post(BATCH, json={"messages": [FRANCE, ITALY]} | given)
            assert answer.status_code == (404 if param == "model" else 400), answer.text
            assert answer.json()["error"]["param"] == param
            assert not engines.asked
            assert all(each.error for each in books.records)

    run(scene)


def test_one_error_ends_all_chats_of_a_batch() -> None:
    def problem(request: EngineRequest) -> Exception | None:
        return RuntimeError("broken") if "Italy" in request.prompt else None

    async def scene() -> None:
        engines, books = FakeEngines(), Books()
        engines.problem = problem
        async with gateway(engines, books) as http:
            answer = await http.post(BATCH, json={"messages": [FRANCE, ITALY, FRANCE], "max_tokens": 1000})
            assert answer.status_code == 500
            assert len(books.records) == len(engines.asked) == 3 and len(engines.left) == 2

    run(scene)


def test_a_rendered_prompt_is_that_of_the_request(served: Served) -> None:
    sampling = {"temperature": 0.25, "top_p": 0.5, "stop": ["x"], "seed": 3}
    chat = post(served, f"{CHAT}/render", {"messages": ITALY, "model": "pirate"} | sampling)
    asked = post(served, CHAT, {"messages": ITALY, "model": "pirate", "max_tokens": 1, "return_token_ids": True})
    assert chat["token_ids"] == asked["prompt_token_ids"] and chat["model"] == "pirate"
    assert chat["sampling_params"].items() >= (sampling | {"n": 1}).items()
    items = [{"role": each["role"], "content": each["content"]} for each in ITALY[1:]]
    response = post(served, "/v1/responses/render", {"instructions": "Be brief.", "input": items, "model": "pirate"})
    assert response["token_ids"] == chat["token_ids"] and response["request_id"].startswith("resp_")
    talk = {"system": "Be brief.", "messages": ITALY[1:], "max_tokens": 9, "model": "demo_model"}
    message = post(served, "/v1/messages/render", talk)
    assert message["token_ids"] == chat["token_ids"] and message["sampling_params"]["max_tokens"] == 9
    one, two = post(served, "/v1/completions/render", {"prompt": ["Hi", "And?"], "stream": True, "max_tokens": 5})
    asked = post(served, "/v1/completions", {"prompt": ["Hi", "And?"], "max_tokens": 1, "return_token_ids": True})
    assert [each["token_ids"] for each in (one, two)] == [each["prompt_token_ids"] for each in asked["choices"]]
    assert one["stream"] is True and one["sampling_params"]["max_tokens"] == 5


def test_offsets_are_those_of_the_text(served: Served) -> None:
    """Each token's characters are at its offsets; truncation keeps them together."""
    text, path = "Ahoy, naïve café 🦊 there", "/v1/completions/render"
    (plain,) = post(served, path, {"prompt": text})
    (found,) = post(served, path, {"prompt": text, "return_token_offsets": True})
    assert plain["token_offsets"] is None and found["token_ids"] == plain["token_ids"]
    assert _characters(served, text, found)
    cut = {"prompt": text, "return_token_offsets": True, "truncate_prompt_tokens": 4}
    (last,) = post(served, path, cut)
    (first,) = post(served, path, cut | {"truncation_side": "right"})
    assert (last["token_ids"], last["token_offsets"]) == (found["token_ids"][-4:], found["token_offsets"][-4:])
    assert (first["token_ids"], first["token_offsets"]) == (found["token_ids"][:4], found["token_offsets"][:4])
    one, two = post(served, path, {"prompt": ["Hi", "And?"], "return_token_offsets": True})
    assert one["token_offsets"][-1][1] == 2 and two["token_offsets"][-1][1] == 4
    (ids,) = post(served, path, {"prompt": found["token_ids"], "return_token_offsets": True})
    assert ids["token_ids"] == found["token_ids"] and ids["token_offsets"] is None  # there is no text
    for endpoint, body in ((CHAT, {"messages": ITALY}), ("/v1/responses", {"input": ITALY})):
        chat = post(served, f"{endpoint}/render", body | {"return_token_offsets": True})
        prompt = post(served, "/detokenize", {"tokens": chat["token_ids"]})["prompt"]
        assert _characters(served, prompt, chat)


def _characters(served: Served, text: str, rendered: dict[str, Any]) -> bool:
    """Return whether the text of each token, without spaces, is at its offsets; part of a character: the whole one."""
    whole = []
    for token, (start, end) in zip(rendered["token_ids"], rendered["token_offsets"], strict=True):
        spelled = post(served, "/detokenize", {"tokens": [token]})["prompt"]
        if start == end:
            continue  # an added special token
        assert spelled.strip() == text[start:end].strip() or ("\ufffd" in spelled and end - start == 1)
        whole += range(start, end)
    return set(whole) >= {place for place, letter in enumerate(text) if not letter.isspace()}


def test_a_rendered_prompt_has_the_request_id_and_the_constraint() -> None:
    async def scene() -> None:
        engines = ScriptedEngines(["x"])
        async with gateway(engines) as http:

            async def ids(path: str, headers: dict[str, str] | None = None, **body: Any) -> Any:
                found = (await http.post(path, json=body, headers=headers)).json()
                return [each["request_id"] for each in found] if isinstance(found, list) else found["request_id"]

            named = {"X-Request-Id": "h"}
            assert await ids(f"{CHAT}/render", messages=FRANCE, request_id="b") == "chatcmpl-b"
            assert await ids(f"{CHAT}/render", named, messages=FRANCE, request_id="b") == "chatcmpl-h"
            assert await ids("/v1/completions/render", prompt="a", request_id="b") == ["cmpl-b"]
            assert await ids("/v1/completions/render", named, prompt=["a", "b"]) == ["cmpl-h-0", "cmpl-h-1"]
            first, second = [await ids(f"{CHAT}/render", messages=FRANCE) for _ in range(2)]
            assert first != second
            body = {"messages": FRANCE, "structured_outputs": {"choice": ["a", "b"]}, "stream": True}
            options = {"include_usage": True}
            found = (await http.post(f"{CHAT}/render", json=body | {"stream_options": options})).json()
            assert found["sampling_params"]["structured_outputs"]["choice"] == ["a", "b"]
            assert found["stream_options"].items() >= options.items()
            for path, wrong, param in (
                (f"{CHAT}/render", {"messages": FRANCE, "return_token_offsets": 2}, "return_token_offsets"),
                ("/v1/responses/render", {"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
                ("/v1/completions/render", {"prompt": "a", "top_k": -2}, "top_k"),
            ):
                answer = await http.post(path, json=wrong)
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
            assert not engines.asked

    run(scene)


@pytest.mark.parametrize("padding", [0, 600 << 10])  # the larger body is decoded in a child process
def test_invocations_answers_a_chat_or_a_completion(padding: int) -> None:
    ids = [[7] * 40] * 2
    bodies: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {"messages": FRANCE, "model": "pirate", "logprobs": True}),
        ("/v1/completions", {"model": "pirate", "logprobs": 2, "prompt": ids}),
        ("/v1/completions", {"prompt": "x", "max_tokens": 0, "echo": True}),
        ("/v1/completions", {"prompt": "x", "stream": True}),
    ]

    async def scene() -> None:
        engines, books = FakeEngines(), Books("key")
        async with gateway(engines, books) as http:
            for path, body in bodies:
                content = json.dumps(body) + " " * padding
                headers = {"Authorization": "Bearer key", "Content-Type": "application/json"}
                direct, invoked = [
                    await http.post(each, content=content, headers=headers) for each in (path, "/invocations")
                ]
                assert direct.status_code == invoked.status_code == 200, invoked.text
                if body.get("stream"):
                    assert invoked.text.count("data: ") == direct.text.count("data: ") > 3
                    continue
                one, other = direct.json(), invoked.json()
                assert one.pop("id").partition("-")[0] == other.pop("id").partition("-")[0]
                assert one | {"created": 0} == other | {"created": 0}
        assert [record.endpoint for record in books.records[1::2]] == ["/invocations"] * len(bodies)
        assert len({(each.owner, each.adapter, each.output_tokens) for each in books.records[:2]}) == 1

    run(scene)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": FRANCE, "prompt": "x"}, "prompt"),
        ({"messages": FRANCE, "temperature": -1}, "temperature"),
        ({"prompt": "x", "temperature": -1}, "temperature"),
        ({"prompt": "x", "tools": []}, "tools"),
        ({"model": "base"}, "messages"),
        ([], None),
    ],
)
def test_invocations_explains_a_wrong_body(body: Any, param: str | None) -> None:
    async def scene() -> None:
        async with gateway(FakeEngines(), Books("key")) as http:
            assert (await http.post("/invocations", json=body)).status_code == 401
            answer = await http.post("/invocations", json=body, headers={"Authorization": "Bearer key"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)

    run(scene)


def test_load_counts_the_requests_that_are_open() -> None:
    async def scene() -> None:
        engines = FakeEngines()
        engines.gate.clear()
        async with gateway(engines) as http:

            async def load() -> int:
                answer = await http.get("/load")
                assert answer.json().keys() == {"server_load"}
                return int(answer.json()["server_load"])

            assert await load() == 0
            body = {"prompt": "x", "max_tokens": 2}
            tasks = [asyncio.create_task(http.post("/v1/completions", json=body)) for _ in range(3)]
            while len(engines.asked) < 3:
                await asyncio.sleep(0)
            assert await load() == 3
            engines.problem = lambda request: ServerError("full", "overloaded") if request is engines.asked[0] else None
            tasks[1].cancel()
            engines.gate.set()
            answers = await asyncio.gather(*tasks, return_exceptions=True)
            assert [getattr(each, "status_code", None) for each in answers] == [429, None, 200]
            assert await load() == 0

    run(scene)


class Loaded(FakeEngines):
    """Two engines with different loads."""

    def last_stats(self) -> dict[str, dict[str, int | float]]:
        return {
            "gpu-0": {"pages": 300, "pages_in_use": 90, "requests_waiting": 2},
            "gpu-1": {"pages": 100, "pages_in_use": 10, "requests_waiting": 1},
        }


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
def test_a_load_report_comes_with_an_answer(path: str) -> None:
    """In the two formats of ORCA that vLLM has, whole and streamed, but not for a user's key."""

    async def scene() -> None:
        body = {"prompt": "x"} if path == "/v1/completions" else {"messages": FRANCE}
        async with gateway(Loaded(), admission=NoAuth("user", admin_key="admin")) as http:

            async def reported(form: str | None, key: str = "admin", **fields: Any) -> str | None:
                headers = {"Authorization": f"Bearer {key}"} | ({} if form is None else {FORMAT_HEADER: form})
                answer = await http.post(path, json=body | {"max_tokens": 2} | fields, headers=headers)
                assert answer.status_code == 200
                return answer.headers.get("endpoint-load-metrics")

            named = "named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_waiting=3.0"
            assert await reported("TEXT") == await reported("text", stream=True) == f"TEXT {named}"
            kind, _, report = str(await reported("JSON")).partition(" ")
            values = {"kv_cache_usage_perc": 0.25, "num_requests_waiting": 3.0}
            assert kind == "JSON" and json.loads(report) == {"named_metrics": values}
            assert [await reported(None), await reported("BIN"), await reported("TEXT", "user")] == [None, None, None]

    run(scene)


class Timed(FakeEngines):
    """Answers whose first token comes after 2 s, of which the request waited 0.5 s, and the last after 5 s."""

    def _chunk(self, *args: Any) -> Any:
        chunk = super()._chunk(*args)
        if chunk.usage is None:
            return chunk
        times = structs.replace(chunk.usage, queue_seconds=0.5, first_token_seconds=2.0, total_seconds=5.0)
        return structs.replace(chunk, usage=times)


@pytest.mark.parametrize("body", [{"messages": FRANCE}, {"prompt": "x"}])
def test_the_metrics_of_a_request_are_the_engine_s_times(body: dict[str, Any]) -> None:
    path = CHAT if "messages" in body else "/v1/completions"
    times = {"time_to_first_token_ms": 1500.0, "generation_time_ms": 3000.0, "queue_time_ms": 500.0}
    four = times | {"mean_itl_ms": 1000.0, "tokens_per_second": pytest.approx(4 / 4.5)}

    async def scene() -> None:
        async with gateway(Timed(), per_request_metrics=True) as http:

            async def ask(**options: Any) -> Any:
                return await http.post(path, json=body | {"max_tokens": 4} | options)

            assert (await ask()).json()["metrics"] == four
            one = (await ask(max_tokens=1)).json()["metrics"]
            assert one == times | {"tokens_per_second": pytest.approx(1 / 4.5)}
            assert "metrics" not in (await ask(n=2)).json()
            *chunks, last, end = events((await ask(stream=True, stream_options={"include_usage": True})).text)
            assert (end, last["choices"], last["metrics"]) == ("[DONE]", [], four) and "usage" in last
            assert not any("metrics" in chunk for chunk in chunks)
            assert "metrics" not in (await ask(stream=True)).text
        async with gateway(Timed()) as http:
            assert "metrics" not in (await http.post(path, json=body)).json()

    run(scene)
