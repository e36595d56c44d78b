"""`logprob_token_ids`: log-probabilities of given tokens are those of the whole vocabulary's."""

import math
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from sidestream.runtime.demo_model import DEMO_MODEL
from sidestream.runtime.llm import LLM, SamplingParams
from support.live_server import Served

PROMPT = "What is the capital of France?"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(DEMO_MODEL), device="cpu", precision="fp32", max_logprobs=-1) as made:
        yield made


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_given_tokens_have_the_values_that_all_have(llm: LLM, temperature: float) -> None:
    options: dict[str, Any] = {"temperature": temperature, "seed": 1, "max_tokens": 6}
    ids = [[7, 80, 7, 300], [5]]
    params = [SamplingParams(**options, logprob_token_ids=each) for each in ids]
    whole = SamplingParams(**options, logprobs=-1)
    *some, every, plain = llm.generate([PROMPT] * 4, [*params, whole, SamplingParams(**options, logprobs=2)])
    for asked, output in zip(ids, some, strict=True):
        completion, full = output.outputs[0], every.outputs[0]
        assert completion.token_ids == full.token_ids and completion.logprobs and full.logprobs
        assert completion.cumulative_logprob == pytest.approx(full.cumulative_logprob, abs=1e-5)
        for token, entry, all_tokens in zip(completion.token_ids, completion.logprobs, full.logprobs, strict=True):
            assert set(entry) == {token, *asked} and next(iter(entry)) == token
            assert all(math.isclose(entry[each].logprob, all_tokens[each].logprob, abs_tol=1e-5) for each in entry)
            assert entry[token].rank == all_tokens[token].rank
            assert all(entry[each].rank == 0 for each in asked if each != token)
    assert plain.outputs[0].logprobs and {len(each) for each in plain.outputs[0].logprobs} <= {2, 3}


@pytest.mark.parametrize("stream", [False, True])
def test_endpoints_return_the_sampled_and_the_given_tokens(served: Served, stream: bool) -> None:
    shared = {"max_tokens": 1, "allowed_token_ids": [42], "return_tokens_as_token_ids": True, "stream": stream}
    given: dict[str, Any] = shared | {"logprob_token_ids": [42, 100, 400, 300]}

    def post(path: str, **body: Any) -> Any:
        answer = httpx.post(served.url + path, json=given | body, timeout=120)
        assert answer.status_code == 200, answer.text
        text = answer.text.partition("data: [DONE]")[0].removeprefix("data: ") if stream else answer.text
        events = [httpx.Response(200, text=each).json() for each in text.split("\n\ndata: ")]
        (found,) = [c["logprobs"] for each in events for c in each["choices"] if c.get("logprobs")]
        return found

    wanted = {f"token_id:{token}" for token in (42, 100, 400, 300)}
    for top in (0, 2):
        (entry,) = post("/v1/completions", prompt=PROMPT, logprobs=top)["top_logprobs"]
        assert set(entry) == wanted
        talk = [{"role": "user", "content": PROMPT}]
        (content,) = post("/v1/chat/completions", messages=talk, logprobs=True, top_logprobs=top)["content"]
        assert {each["token"] for each in content["top_logprobs"]} == wanted
        assert content["token"] == "token_id:42"


@pytest.mark.parametrize("softmax", [True, False])
@pytest.mark.parametrize("item_first", [True, False])
def test_a_label_has_the_probability_of_the_next_token(served: Served, softmax: bool, item_first: bool) -> None:
    def post(path: str, **body: Any) -> Any:
        answer = httpx.post(served.url + path, json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def ids(text: str, special: bool) -> list[int]:
        tokens: list[int] = post("/tokenize", prompt=text, add_special_tokens=special)["tokens"]
        return tokens

    items, labels = ["Paris.", "Rome."], [80, 7, 300]
    options = {"apply_softmax": softmax, "item_first": item_first, "model": "pirate"}
    found = post("/generative_scoring", query=PROMPT, items=items, label_token_ids=labels, **options)
    assert [each["index"] for each in found["data"]] == [0, 1]
    assert found["usage"]["completion_tokens"] == 2
    for item, given in zip(items, found["data"], strict=True):
        prompt = ids(item, False) + ids(PROMPT, True) if item_first else ids(PROMPT, True) + ids(item, False)
        body = {"prompt": prompt, "max_tokens": 1, "logprobs": 0, "return_tokens_as_token_ids": True, "model": "pirate"}
        scores = post("/v1/completions", **body, logprob_token_ids=labels)["choices"][0]["logprobs"]["top_logprobs"][0]
        probabilities = [math.exp(scores[f"token_id:{label}"]) for label in labels]
        wanted = probabilities[0] / sum(probabilities) if softmax else probabilities[0]
        assert given["score"] == pytest.approx(wanted, rel=1e-4)
    wrong = {"query": PROMPT, "items": items, "label_token_ids": [5, 1 << 20]}
    answer = httpx.post(f"{served.url}/generative_scoring", json=wrong, timeout=120)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "label_token_ids"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"logprobs": None}, "needs logprobs"),
        ({"logprob_token_ids": [1 << 20]}, "vocabulary"),
        ({"logprob_token_ids": list(range(21))}, "--max-logprobs 21"),
    ],
)
def test_wrong_tokens_are_named(served: Served, body: dict[str, Any], words: str) -> None:
    given = {"prompt": PROMPT, "logprobs": 0, "logprob_token_ids": [5], "max_tokens": 1} | body
    answer = httpx.post(f"{served.url}/v1/completions", json=given, timeout=120)
    error = answer.json()["error"]
    assert answer.status_code == 400 and words in error["message"] and "logprob_token_ids" in error["message"], error
