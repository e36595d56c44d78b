"""Weighted sums of adapters over HTTP: fields, rights, names, records and refusals, over fake engines."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from sidestream.runtime.gateway.interfaces import AdapterCard
from sidestream.runtime.gateway.metrics.metrics import Metrics
from support.gateway import Books, FakeEngines, gateway

WEIGHTS = {"shout": 0.3, "pirate": 0.7}
NAME = "pirate*0.7+shout*0.3"
HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/v1/chat/completions": {"messages": HI, "max_tokens": 2},
    "/v1/responses": {"input": "x", "max_output_tokens": 2},
    "/v1/messages": {"messages": HI, "max_tokens": 2},
}
LOAD = "/v1/load_lora_adapter"


def run(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), 120))


@pytest.mark.parametrize("path", BODIES)
def test_each_endpoint_has_weights(path: str) -> None:
    async def scene() -> None:
        engines, books = FakeEngines(), Books()
        async with gateway(engines, books) as http:
            for more in ({}, {"model": "base"}):
                answer = await http.post(path, json=BODIES[path] | {"lora_weights": WEIGHTS} | more)
                assert answer.status_code == 200 and answer.json()["model"] == NAME
            one = await http.post(path, json=BODIES[path] | {"lora_weights": {"pirate": 1, "shout": 0}})
            assert one.json()["model"] == "pirate"
        assert [request.adapter for request in engines.asked] == [NAME, NAME, "pirate"]
        assert [record.adapter for record in books.records] == [NAME, NAME, "pirate"]

    run(scene)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("hidden", WEIGHTS)
def test_a_client_may_sum_only_what_it_may_use(path: str, hidden: str) -> None:
    async def scene() -> None:
        engines, books = FakeEngines(), Books()
        books.hidden.add(hidden)
        async with gateway(engines, books) as http:
            refused = await http.post(path, json=BODIES[path] | {"lora_weights": WEIGHTS})
            unknown = await http.post(path, json=BODIES[path] | {"lora_weights": {**WEIGHTS, "absent": 0.1}})
            without = await http.post(path, json=BODIES[path] | {"lora_weights": {**WEIGHTS, hidden: 0}})
        assert refused.status_code == unknown.status_code == 404 and f"'{hidden}' does not exist" in refused.text
        assert without.status_code == 200
        assert len(engines.asked) == 1

    run(scene)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"lora_weights": {"base": 0.5, "pirate": 1}}, "lora_weights: 'base' is the base model"),
        ({"lora_weights": {"mix": 0.5, "pirate": 1}}, "lora_weights: 'mix' is a sum"),
        ({"lora_weights": {"pirate": 0}}, "lora_weights has no weight other than 0"),
        ({"lora_weights": {"shout": 1, "pirate": 101}}, "lora_weights['pirate']=101 must be a number of at most 100"),
        ({"lora_weights": {"shout": 1, "pirate": "1"}}, "lora_weights['pirate']='1' must be a number"),
        ({"lora_weights": {"shout": 1, "a b": 1}}, "'-' only; change 'a b'"),
        ({"lora_weights": {}}, "lora_weights"),
        ({"lora_weights": {f"a{index}": 1 for index in range(9)}}, "lora_weights"),
        ({"lora_weights": WEIGHTS, "model": "pirate"}, "lora_weights names the adapters"),
    ],
    ids=str,
)
@pytest.mark.parametrize("path", BODIES)
def test_bad_weights_are_refused(path: str, fields: dict[str, Any], words: str) -> None:
    async def scene() -> None:
        engines = FakeEngines()
        engines.cards.append(AdapterCard("mix", 12, "cc", path="sum:pirate*0.5+shout*0.5"))
        async with gateway(engines) as http:
            answer = await http.post(path, json=BODIES[path] | fields)
        assert answer.status_code == 400 and words in answer.text and not engines.asked

    run(scene)


def test_a_name_is_given_to_a_sum() -> None:
    async def scene() -> None:
        engines = FakeEngines()
        engines.cards.append(AdapterCard("mix", 12, "cc", path="sum:pirate*0.5+shout*0.5"))
        async with gateway(engines) as http:
            named = await http.post(LOAD, json={"lora_name": "both", "lora_sum": WEIGHTS, "load_inplace": True})
            assert named.status_code == 200
            alias = await http.post("/load_lora_adapter", json={"lora_name": "also", "lora_sum": {"pirate": 1}})
            assert alias.status_code == 200
            for fields, status, words in (
                ({}, 400, "exactly one of lora_path and lora_sum"),
                ({"lora_path": "/a", "lora_sum": WEIGHTS}, 400, "exactly one of lora_path and lora_sum"),
                ({"lora_path": f"sum:{NAME}"}, 400, "lora_sum"),
                ({"lora_sum": {"pirate": 1, "absent": 1}}, 404, "'absent' does not exist"),
                ({"lora_sum": {"mix": 1, "pirate": 1}}, 400, "'mix' is a sum"),
                ({"lora_sum": {"x": 1, "pirate": 1}}, 400, "lora_sum has 'x' itself"),
                ({"lora_sum": {"pirate": 0}}, 400, "lora_sum has no weight other than 0"),
            ):
                refused = await http.post(LOAD, json={"lora_name": "x"} | fields)
                assert refused.status_code == status and words in refused.text, fields
        assert engines.calls == [("load", "both", f"sum:{NAME}", True), ("load", "also", "sum:pirate", False)]

    run(scene)


def test_metrics_have_a_series_by_adapters_not_by_weights() -> None:
    async def scene() -> None:
        engines = FakeEngines()
        async with gateway(engines, observer=Metrics()) as http:
            for weight in (0.1, 0.2, 0.3):
                body = BODIES["/v1/completions"] | {"lora_weights": {"pirate": weight, "shout": 1}}
                assert (await http.post("/v1/completions", json=body)).status_code == 200
            text = (await http.get("/metrics")).text
        assert 'model="pirate+shout"' in text and "0.1" not in "".join(
            line for line in text.splitlines() if "pirate" in line
        )

    run(scene)
