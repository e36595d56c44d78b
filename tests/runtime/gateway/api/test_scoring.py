"""Log-probabilities over HTTP of the demo model equal those of transformers, in the ways of evaluation harnesses."""

import functools
import random

import httpx
import pytest
import torch
from peft import PeftModel
from sidestream.runtime.demo_model import DEMO_MODEL, demo_adapters
from support.gateway import events
from transformers import AutoModelForCausalLM

TOLERANCE = 1e-4


@functools.cache
def reference(adapter):
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    return (model if adapter is None else PeftModel.from_pretrained(model, demo_adapters()[adapter])).eval()


def expected(adapter, ids):
    """Log-probabilities [tokens - 1, vocabulary] of each token after the first."""
    with torch.inference_mode():
        return reference(adapter)(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)


def prompts(seed, count=3):
    draw = random.Random(seed)
    return [[draw.randrange(3, 500) for _ in range(draw.randrange(2, 90))] for _ in range(count)]


def post(served, path, body):
    answer = httpx.post(served.url + path, json=body, timeout=600)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("adapter", [None, "pirate"])
def test_an_echo_scores_prompts_like_transformers(served, adapter, max_tokens):
    """The request of lm-eval's local-completions."""
    given = prompts(7)
    model = {} if adapter is None else {"model": adapter}
    body = {"prompt": given, "temperature": 0, "max_tokens": max_tokens, "logprobs": 1, "seed": 1234, "echo": True}
    answer = post(served, "/v1/completions", body | model)
    assert answer["usage"]["completion_tokens"] == max_tokens * len(given)
    for ids, choice in zip(given, answer["choices"], strict=True):
        found, scores = choice["logprobs"], expected(adapter, ids)
        assert len(found["tokens"]) == len(ids) + max_tokens
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        for place, (token, row) in enumerate(zip(ids[1:], scores, strict=True), 1):
            assert found["token_logprobs"][place] == pytest.approx(row[token].item(), abs=TOLERANCE)
            top = found["top_logprobs"][place]
            assert max(top.values()) == pytest.approx(row.max().item(), abs=TOLERANCE)
            assert found["token_logprobs"][place] in top.values()


def test_scores_of_a_stream_and_of_ids_as_names_are_the_same(served):
    ids = prompts(11, 1)[0]
    body = {"prompt": ids, "max_tokens": 0, "logprobs": 2, "echo": True, "return_tokens_as_token_ids": True}
    whole = post(served, "/v1/completions", body)["choices"][0]
    assert whole["logprobs"]["tokens"] == [f"token_id:{token}" for token in ids]
    text = httpx.post(served.url + "/v1/completions", json=body | {"stream": True}, timeout=600).text
    streamed = [choice for event in events(text)[:-1] for choice in event["choices"]]
    for name, values in whole["logprobs"].items():
        assert [value for choice in streamed if choice["logprobs"] for value in choice["logprobs"][name]] == values
    assert "".join(choice["text"] for choice in streamed) == whole["text"]
    assert streamed[-1]["finish_reason"] == "length"


def test_prompt_logprobs_of_a_chat_belong_to_its_ids(served):
    body = {"messages": [{"role": "user", "content": "Ahoy, who sails?"}], "max_tokens": 2, "temperature": 0}
    answer = post(served, "/v1/chat/completions", body | {"prompt_logprobs": 1, "return_token_ids": True})
    ids = answer["prompt_token_ids"]
    assert answer["prompt_logprobs"][0] is None and len(answer["prompt_logprobs"]) == len(ids)
    for token, entry, row in zip(ids[1:], answer["prompt_logprobs"][1:], expected(None, ids), strict=True):
        assert entry[str(token)]["logprob"] == pytest.approx(row[token].item(), abs=TOLERANCE)


def test_the_sampled_token_is_in_the_top_logprobs_of_a_chat(served):
    body = {"messages": [{"role": "user", "content": "Speak"}], "max_tokens": 20, "temperature": 3.0, "seed": 5}
    body |= {"ignore_eos": True, "logprobs": True, "return_tokens_as_token_ids": True}
    for top in (1, 3):
        content = post(served, "/v1/chat/completions", body | {"top_logprobs": top})["choices"][0]["logprobs"][
            "content"
        ]
        names = [[each["token"] for each in entry["top_logprobs"]] for entry in content]
        assert all(entry["token"] in own for entry, own in zip(content, names, strict=True))
        assert {len(own) for own in names} == {top, top + 1}, "both kinds of tokens have to be sampled"


def test_returned_ids_are_those_of_the_text(served):
    body = {"prompt": "Ahoy there", "max_tokens": 8, "return_token_ids": True, "ignore_eos": True}
    choice = post(served, "/v1/completions", body)["choices"][0]
    detokenized = functools.partial(post, served, "/detokenize")
    assert len(choice["token_ids"]) == 8
    whole = detokenized({"tokens": choice["prompt_token_ids"] + choice["token_ids"]})["prompt"]
    assert whole.endswith("Ahoy there" + choice["text"])
