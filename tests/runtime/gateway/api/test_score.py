"""/v1/score and `Client.score`: log-probabilities of rollouts to the bit, rights, and what is refused."""

import asyncio
import base64
import contextlib
import random
from typing import Any

import httpx
import numpy as np
import pytest
from sidestream import AsyncClient, Client, RequestError, SamplingParams
from support.gateway import Books, FakeEngines, gateway
from support.live_server import Served

Segments = list[tuple[str, list[int]]]


def body_of(sequences: list[Segments], **fields: Any) -> dict[str, Any]:
    segments = ([{"kind": kind, "token_ids": ids} for kind, ids in sequence] for sequence in sequences)
    return {"sequences": [{"segments": list(each)} for each in segments]} | fields


def post(served: Served, path: str, body: Any, status: int = 200) -> Any:
    answer = httpx.post(served.url + path, json=body, timeout=600)
    assert answer.status_code == status, answer.text
    return answer.json()


def rollout(served: Served, model: str | None, prompt: list[int], seed: int) -> tuple[list[int], np.ndarray]:
    """TRL's request of one turn."""
    body = {"model": model, "prompt": prompt, "max_tokens": 20, "temperature": 1.0, "seed": seed}
    answer = post(served, "/v1/completions", body | {"return_token_ids": True, "logprobs": 0})
    choice = answer["choices"][0]
    return choice["token_ids"], np.array(choice["logprobs"]["token_logprobs"], np.float32)


def decoded(text: str, dtype: str = "<f4") -> np.ndarray:
    return np.frombuffer(base64.b64decode(text, validate=True), dtype)


def random_ids(seed: int, length: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(3, 500) for _ in range(length)]


@pytest.mark.parametrize("model", [None, "pirate"])
def test_scores_are_the_log_probabilities_of_the_rollouts(served, model):
    prompts = [random_ids(seed, length) for seed, length in enumerate((1, 30, 90))]
    answers = [rollout(served, model, prompt, seed) for seed, prompt in enumerate(prompts)]
    sequences = [[("given", prompt), ("sampled", ids)] for prompt, (ids, _) in zip(prompts, answers, strict=True)]
    scores = post(served, "/v1/score", body_of(sequences, model=model))
    assert scores["object"] == "list" and scores["model"] == (model or "demo_model")
    total = sum(len(ids) for sequence in sequences for _, ids in sequence)
    assert scores["usage"]["total_tokens"] == total and scores["usage"]["completion_tokens"] == len(prompts)
    for index, (found, (ids, logprobs)) in enumerate(zip(scores["data"], answers, strict=True)):
        assert (found["index"], found["num_tokens"]) == (index, len(ids)) and "top_logprobs" not in found
        assert decoded(found["logprobs"]).tobytes() == logprobs.tobytes()
    with Client(served.address) as client:
        own = client.score(prompts, [ids for ids, _ in answers], model)
        assert [score.logprobs.tobytes() for score in own] == [logprobs.tobytes() for _, logprobs in answers]


def test_all_turns_of_a_conversation_are_scored_at_once(served):
    """Each turn is a rollout whose prompt is everything before it, with the tool's tokens in between."""
    segments: Segments = [("given", random_ids(1, 40))]
    expected = []
    for turn in range(3):
        ids, logprobs = rollout(served, "pirate", [token for _, part in segments for token in part], turn)
        segments += [("sampled", ids[:9]), ("sampled", ids[9:]), ("given", random_ids(turn, 1 + 12 * turn))]
        expected.append(logprobs)
    (found,) = post(served, "/v1/score", body_of([segments], model="pirate"))["data"]
    assert decoded(found["logprobs"]).tobytes() == np.concatenate(expected).tobytes()


def test_the_likeliest_tokens_are_those_of_completions(served):
    prompt, response = random_ids(1, 20), random_ids(2, 6)
    (found,) = post(served, "/v1/score", body_of([[("given", prompt), ("sampled", response)]], top_logprobs=3))["data"]
    ids, values = decoded(found["top_token_ids"], "<i4"), decoded(found["top_logprobs"])
    body = {"prompt": prompt + response, "max_tokens": 1, "prompt_logprobs": 3}
    entries = post(served, "/v1/completions", body)["choices"][0]["prompt_logprobs"][-6:]
    for entry, own_ids, own_values in zip(entries, ids.reshape(6, 3), values.reshape(6, 3), strict=True):
        likeliest = sorted(entry.items(), key=lambda item: item[1]["rank"])[:3]
        assert [(int(token), np.float32(each["logprob"])) for token, each in likeliest] == [
            *zip(own_ids.tolist(), own_values, strict=True)
        ]


def test_a_client_scores_texts_tops_and_sums_of_adapters(served):
    with Client(served.address) as client:
        ids = client.tokenize("Ahoy there"), client.tokenize(" matey", add_special_tokens=False)
        by_text, by_ids = client.score(["Ahoy there", ids[0]], [" matey", ids[1]], "pirate", top=2)
        assert by_text.logprobs.tobytes() == by_ids.logprobs.tobytes()
        assert by_text.top_logprobs.shape == by_text.top_token_ids.shape == (len(ids[1]), 2)
        weights = {"pirate": 0.5, "shout": 0.5}
        (summed,) = client.score("Ahoy there", " matey", weights)
        sequence: Segments = [("given", ids[0]), ("sampled", ids[1])]
        (found,) = post(served, "/v1/score", body_of([sequence], lora_weights=weights))["data"]
        assert decoded(found["logprobs"]).tobytes() == summed.logprobs.tobytes() != by_ids.logprobs.tobytes()
        for arguments, words in (
            (([[1]], [[2], [3]]), "responses has 2 entries for 1 prompts"),
            (([[1]], [[2] * 256]), "the sequence has 257 tokens, more than max_model_len=256"),
            (([[1], [1]], [[2], [1 << 20]]), "pair 1: token id 1048576 is out of vocabulary"),
            (([[1]], [[2]], "gone"), "adapter 'gone' is not known"),
        ):
            with pytest.raises(RequestError) as caught:
                client.score(*arguments)
            assert words in str(caught.value)
        assert len(client.score([[1] * 200], [[2] * 56])[0].logprobs) == 56


@pytest.mark.parametrize(
    ("prompt", "scored", "params", "words"),
    [
        ([1, 2, 3], [(0, 2)], {}, "scored[0]=[0, 2] must be a range [begin, end) of prompt tokens from 1 to 3"),
        ([1, 2, 3], [(2, 2)], {}, "scored[0]=[2, 2]"),
        ([1, 2, 3], [(2, 4)], {}, "scored[0]=[2, 4]"),
        ([1, 2, 3], [(1, 2), (1, 3)], {}, "scored[1]=[1, 3] must be a range [begin, end) of prompt tokens from 2"),
        ([1, 2, 3], [(1, 1 << 50)], {}, "must be a range"),
        ([1, 2, 3], [(1, 2)], {"prompt_logprobs": None}, "scored needs prompt_logprobs"),
        ("abc", [(1, 2)], {}, "scored needs prompt_token_ids"),
    ],
)
def test_ranges_that_are_none_are_refused_by_the_engine(served, prompt, scored, params, words):
    async def ask() -> None:
        async with AsyncClient(served.address) as client:
            lists = client.stream_lists(prompt, SamplingParams(**{"prompt_logprobs": 0} | params), scored=scored)
            async with contextlib.aclosing(lists):
                async for _ in lists:
                    pass

    with pytest.raises(RequestError) as caught:
        asyncio.run(ask())
    assert words in str(caught.value)


SCORED = [[("given", [1, 2]), ("sampled", [3])]]


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({}, "sequences", "sequences is missing"),
        ({"sequences": []}, "sequences", "must not be empty"),
        (body_of([[]]), "sequences[0].segments", "must not be empty"),
        (body_of([[("given", [1])]]), "sequences[0]", "no token is sampled"),
        (body_of([[("given", [1]), ("sampled", [])]]), "sequences[0]", "no token is sampled"),
        (body_of([*SCORED, [("sampled", [1, 2])]]), "sequences[1]", "sequences[1]: the first token is sampled"),
        (body_of([[("given", [1]), ("sampled", [256])]]), "sequences[0]", "out of vocabulary: the model has 256"),
        (body_of([[("given", [256]), ("sampled", [1])]]), "sequences[0]", "out of vocabulary: the model has 256"),
        (body_of([[("given", [1] * 4096), ("sampled", [1])]]), "sequences[0]", "4097 tokens, more than max_model_len"),
        (body_of([[("given", [-1]), ("sampled", [1])]]), "sequences[0].segments[0].token_ids[0]", "at least 0"),
        (body_of([[("guessed", [1])]]), "sequences[0].segments[0].kind", "must be 'given' or 'sampled'"),
        (body_of(SCORED, top_logprobs=21), "top_logprobs", "give 0 to 20"),
        (body_of(SCORED, temperature=1.0), "temperature", "there is no field `temperature`"),
        ({"model": "base", "text_1": "a", "text_2": "b"}, "text_1", "no reranker is served here"),
        ({"model": "base", "queries": ["a"], "documents": ["b"]}, "queries", "cross-encoder"),
        ({"query": "a", "items": ["b"], "label_token_ids": [1]}, "query", "/v1/score returns log-probabilities"),
        (body_of(SCORED * 1025), "sequences", "at most 1024 entries"),
    ],
)
def test_a_wrong_body_is_refused_by_the_name_of_its_field(body, field, words):
    engines = FakeEngines()

    async def ask() -> Any:
        async with gateway(engines) as http:
            return await http.post("/v1/score", json=body)

    answer = asyncio.run(ask())
    assert answer.status_code == 400 and not engines.asked
    error = answer.json()["error"]
    assert error["param"] == field and words in error["message"]


def test_rights_and_limits_are_those_of_completions():
    books, engines = Books(), FakeEngines()
    books.hidden = {"shout"}

    async def ask(**fields: Any) -> Any:
        async with gateway(engines, books) as http:
            return await http.post("/v1/score", json=body_of(SCORED * 2, **fields))

    for model in ("shout", "gone"):
        assert asyncio.run(ask(model=model)).status_code == 404
    assert asyncio.run(ask(lora_weights={"pirate": 1.0, "shout": 1.0})).status_code == 404
    assert not engines.asked and not books.records
    answer = asyncio.run(ask(model="pirate", priority=3, deadline_seconds=9))
    assert answer.status_code == 200 and answer.headers["x-ratelimit-limit-requests"] == "9"
    assert [(each.prompt, each.adapter, each.priority) for each in engines.asked] == [([1, 2], "pirate", 3)] * 2
    (record,) = books.records
    assert (record.endpoint, record.prompt_tokens, record.output_tokens) == ("/v1/score", 4, 2)
    books.limit, engines.problem = 1, lambda request: RequestError("no")
    assert asyncio.run(ask()).status_code == 400 and len(books.records) == 2
