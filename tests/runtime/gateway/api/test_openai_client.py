"""OpenAI's Python client with a server of the demo model, and with fake engines that fail."""

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from openai import AsyncOpenAI, OpenAI
from sidestream.runtime.api.errors import OverloadedError
from sidestream.runtime.demo_model import DEMO_MODEL
from sidestream.runtime.gateway.app import build_app
from sidestream.runtime.gateway.auth.admission import NoAuth
from sidestream.runtime.gateway.metrics.metrics import Metrics
from sidestream.runtime.gateway.metrics.observers import CompositeObserver
from sidestream.runtime.gateway.settings import GatewaySettings
from sidestream.runtime.text.tokenizer import load_tokenizer
from support.gateway import FakeEngines
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS = json.loads((DEMO_MODEL / "prompts.json").read_text())
CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def client(served: Any) -> OpenAI:
    return OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def name_of(entry: dict[str, Any]) -> str:
    return entry["adapter"] or "demo_model"


@pytest.mark.parametrize("entry", PROMPTS, ids=name_of)
def test_greedy_answers_are_the_known_ones_whole_and_streamed(client: OpenAI, entry: dict[str, Any]) -> None:
    asked = {"model": name_of(entry), "prompt": entry["prompt"], "temperature": 0, "max_tokens": 48}
    whole = client.completions.create(**asked)
    *chunks, last = client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    assert whole.choices[0].text.strip() == entry["answer"]
    assert "".join(chunk.choices[0].text for chunk in chunks).strip() == entry["answer"]
    assert whole.choices[0].finish_reason == "stop" and last.usage is not None and whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens


def test_drafts_are_told_and_change_nothing(served: Any, client: OpenAI) -> None:
    """In the usage as OpenAI spells it, whole and streamed, and in the metrics of the adapter; a body may say no."""
    asked: Any = {"model": "pirate", "prompt": "one two three one two three one two", "max_tokens": 30}
    accepted = []
    for how in ({"temperature": 0}, {"temperature": 0.5, "seed": 3}):
        plain = client.completions.create(**asked, **how, extra_body={"speculation": "off", "ignore_eos": True})
        before = counted(served, "accepted_tokens", "pirate")
        whole = client.completions.create(**asked, **how, extra_body={"ignore_eos": True})
        *parts, last = client.completions.create(
            **asked, **how, extra_body={"ignore_eos": True}, stream=True, stream_options={"include_usage": True}
        )
        assert plain.choices[0].text == whole.choices[0].text == "".join(part.choices[0].text for part in parts)
        usages = [answer.usage.completion_tokens_details for answer in (plain, whole, last)]
        assert (usages[0].accepted_prediction_tokens, usages[0].rejected_prediction_tokens) == (0, 0)
        assert usages[1].accepted_prediction_tokens + usages[1].rejected_prediction_tokens > 0
        told = usages[1].accepted_prediction_tokens + usages[2].accepted_prediction_tokens
        assert counted(served, "accepted_tokens", "pirate") - before == told
        accepted.append(told)
    assert accepted[0] > 0
    recalled, all_of_them = (counted(served, f"{kind}accepted_tokens", "pirate") for kind in ("history_", ""))
    assert 0 < recalled <= all_of_them, "the same was asked twice"
    assert recalled <= counted(served, "history_draft_tokens", "pirate") <= counted(served, "draft_tokens", "pirate")
    with pytest.raises(openai.BadRequestError, match="speculation"):
        client.completions.create(**asked, extra_body={"speculation": 9})


def counted(served: Any, name: str, model: str) -> float:
    text = httpx.get(f"{served.url}/metrics").text
    found = re.search(rf'^sidestream_{name}_total{{model="{model}"}} (\S+)$', text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def test_the_readme_s_first_request_has_the_answer_that_it_shows(served: Any) -> None:
    text = (Path(__file__).parents[4] / "README.md").read_text()
    asked = re.search(r"curl http://127.0.0.1:8000(\S+) --json '(.*)'\n.*\"text\":\"(.*?)\"", text)
    assert asked is not None
    kind = {"Content-Type": "application/json"}
    answer = httpx.post(f"{served.url}{asked[1]}", content=asked[2], headers=kind, timeout=60)
    assert answer.json()["choices"][0]["text"] == asked[3]


def test_a_chat_and_a_response_say_the_same(client: OpenAI) -> None:
    entry = next(entry for entry in PROMPTS if entry["adapter"] == "pirate")
    messages: Any = [{"role": "user", "content": entry["prompt"]}]
    chat = client.chat.completions.create(
        model="pirate", messages=messages, temperature=0, max_completion_tokens=48, logprobs=True, top_logprobs=3
    )
    streamed = client.chat.completions.create(model="pirate", messages=messages, temperature=0, stream=True)
    response = client.responses.create(model="pirate", input=entry["prompt"], temperature=0)
    with client.responses.stream(model="pirate", input=entry["prompt"], temperature=0) as stream:
        final = stream.get_final_response()
    assert (chat.choices[0].message.content or "").strip() == entry["answer"]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed).strip() == entry["answer"]
    assert response.output_text.strip() == final.output_text.strip() == entry["answer"]
    assert chat.choices[0].logprobs is not None and chat.choices[0].logprobs.content is not None
    for place in chat.choices[0].logprobs.content:
        assert place.logprob == max(top.logprob for top in place.top_logprobs), "greedy takes the likeliest"
    assert response.usage is not None and chat.usage is not None
    assert response.usage.output_tokens == chat.usage.completion_tokens


def test_many_streams_at_once_over_all_adapters_are_each_answered_rightly(served: Any) -> None:
    async def scene() -> None:
        async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:

            async def ask(entry: dict[str, Any]) -> str:
                stream = await client.completions.create(
                    model=name_of(entry), prompt=entry["prompt"], temperature=0, max_tokens=48, stream=True
                )
                return "".join([chunk.choices[0].text async for chunk in stream]).strip()

            asked = PROMPTS * 4
            answers = await asyncio.gather(*map(ask, asked))
            assert answers == [entry["answer"] for entry in asked]
            models = [model.id async for model in client.models.list()]
            assert models[0] == "demo_model" and set(models) >= {"pirate", "shout", "json", "yoda"}

    asyncio.run(scene())


def test_a_seed_repeats_a_sample_and_n_gives_several(client: OpenAI) -> None:
    def texts(seed: int) -> list[str]:
        asked = {"model": "demo_model", "prompt": "What is", "seed": seed, "n": 3, "max_tokens": 8, "temperature": 1.5}
        return [choice.text for choice in client.completions.create(**asked).choices]  # type: ignore[call-overload]

    assert texts(7) == texts(7) and len(set(texts(7))) > 1


def test_a_prompt_s_tokens_are_scored(served: Any) -> None:
    body = {"prompt": "What is the capital of France?", "max_tokens": 2, "n": 2, "prompt_logprobs": 2, "temperature": 0}
    with httpx.Client(base_url=served.url, timeout=60) as http:
        ids = http.post("/tokenize", json={"prompt": body["prompt"]}).json()["tokens"]
        first, second = http.post("/v1/completions", json=body).json()["choices"]
        streamed = http.post("/v1/completions", json=body | {"stream": True})
    assert first["prompt_logprobs"] == second["prompt_logprobs"]
    start, *places = first["prompt_logprobs"]
    assert start is None and len(places) == len(ids) - 1
    for token, place in zip(ids[1:], places, strict=True):
        assert str(token) in place and 2 <= len(place) <= 3 and min(each["rank"] for each in place.values()) == 1
    assert streamed.status_code == 400 and streamed.json()["error"]["param"] == "prompt_logprobs"


def test_tokens_are_the_tokenizer_s(served: Any) -> None:
    tokenizer = load_tokenizer(Path(DEMO_MODEL))
    assert tokenizer is not None
    text = "What is the capital of France?"
    with httpx.Client(base_url=served.url, timeout=60) as http:
        tokens = http.post("/tokenize", json={"prompt": text}).json()["tokens"]
        bare = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
        back = http.post("/detokenize", json={"tokens": bare}).json()["prompt"]
        wrong = http.post("/detokenize", json={"tokens": [2**31]})
    assert tokens == tokenizer.encode(text) and tokens[1:] == bare and back == text
    assert wrong.status_code == 400


def test_an_echo_has_the_log_probabilities_that_transformers_computes(client: OpenAI) -> None:
    prompt = "What is the capital of France?"
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    ids = tokenizer(prompt).input_ids
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    asked: Any = {"model": "demo_model", "temperature": 0, "max_tokens": 4, "echo": True, "logprobs": 2, "n": 2}
    whole = client.completions.create(prompt=prompt, **asked)
    grown: dict[int, list[Any]] = {0: [], 1: []}
    for event in client.completions.create(prompt=prompt, **asked, stream=True):
        grown[event.choices[0].index].append(event.choices[0])
    for choice in whole.choices:
        told = choice.logprobs
        assert told is not None and told.tokens and told.token_logprobs and told.text_offset and told.top_logprobs
        assert choice.text.startswith(prompt) and len(told.tokens) == len(ids) + 4
        first, *rest = told.token_logprobs
        assert first is None and told.top_logprobs[0] is None and rest[: len(expected)] == pytest.approx(expected, 1e-3)
        for token, top in list(zip(told.tokens, told.top_logprobs, strict=True))[1:]:
            assert top is not None and token in top and len(top) in (2, 3), "the two likeliest, and the token itself"
        assert told.top_logprobs[-1].keys() >= {told.tokens[-1]}, "greedy: the likeliest token was drawn"
        for token, offset in list(zip(told.tokens, told.text_offset, strict=True))[1:]:
            assert choice.text[offset : offset + len(token)] == token
        parts = grown[choice.index]
        assert "".join(part.text for part in parts) == choice.text
        for name in ("tokens", "text_offset"):
            assert [each for part in parts for each in getattr(part.logprobs, name)] == getattr(told, name)
    by_ids = client.completions.create(prompt=ids, **asked | {"n": 1}).choices[0]
    assert by_ids.text == tokenizer.decode(ids) + whole.choices[0].text.removeprefix(prompt)
    assert by_ids.logprobs is not None and by_ids.logprobs.tokens == whole.choices[0].logprobs.tokens  # type: ignore[union-attr]


SPLIT = "7️⃣ of 漢字 🎈🎈 ő"


@pytest.fixture(scope="module")
def split(client: OpenAI) -> dict[str, Any]:
    """How an answer is asked for whose characters are split over tokens, and nothing else."""
    vocabulary = set(AutoTokenizer.from_pretrained(DEMO_MODEL).get_vocab())
    assert not vocabulary & {"漢", "🎈"}
    return {
        "temperature": 0,
        "max_tokens": 100,
        "extra_body": {"structured_outputs": {"choice": [SPLIT]}},
    }


def test_the_bytes_of_a_chat_s_tokens_are_those_of_its_text(client: OpenAI, split: dict[str, Any]) -> None:
    asked: Any = {"model": "pirate", "messages": CHAT, "logprobs": True, "top_logprobs": 4, **split}
    whole = client.chat.completions.create(**asked).choices[0]
    streamed = [event.choices[0] for event in client.chat.completions.create(**asked, stream=True) if event.choices]
    parts = [entry for part in streamed if part.logprobs for entry in part.logprobs.content or []]
    assert whole.logprobs is not None and whole.message.content == SPLIT
    assert "".join(part.delta.content or "" for part in streamed) == SPLIT
    for entries in (whole.logprobs.content or [], parts):
        spelled = b"".join(bytes(entry.bytes or []) for entry in entries)
        assert spelled.removesuffix(b"</s>") == SPLIT.encode()
        for entry in entries:  # the sampled token is added to the four likeliest
            assert len(entry.top_logprobs) in (4, 5) and entry.token in [top.token for top in entry.top_logprobs]
    form: Any = {"format": {"type": "json_schema", "name": "split", "schema": {"const": SPLIT}}}
    response = client.responses.create(model="pirate", input="hi", temperature=0, top_logprobs=1, text=form)
    message: Any = response.output[0]
    told = b"".join(bytes(entry.bytes) for entry in message.content[0].logprobs)
    assert json.loads(response.output_text) == SPLIT and told.startswith(response.output_text.encode())


def test_a_completion_s_tokens_stand_where_their_offsets_say(client: OpenAI, split: dict[str, Any]) -> None:
    asked: Any = {"model": "pirate", "prompt": "the 🎈", "logprobs": 3, "echo": True, **split}
    for more in ({"echo": False}, {}, {"stop": ["字"]}):
        whole = client.completions.create(**asked | more).choices[0]
        parts = [event.choices[0] for event in client.completions.create(**asked | more, stream=True)]
        told, text = whole.logprobs, whole.text
        assert told is not None and told.tokens and told.text_offset and told.top_logprobs
        assert text == ("the 🎈" if more != {"echo": False} else "") + SPLIT[: 8 if "stop" in more else None]
        for token, offset, top in zip(told.tokens, told.text_offset, told.top_logprobs, strict=True):
            assert offset <= len(text) and (top is None or (token in top and len(top) in (3, 4)))
            if not token.startswith(("bytes:", "<")) and offset < len(text):
                assert text[offset : offset + len(token)] == token
        assert "".join(part.text for part in parts) == text
        for name in ("tokens", "text_offset", "top_logprobs"):
            assert [each for part in parts if part.logprobs for each in getattr(part.logprobs, name)] == getattr(
                told, name
            )


def test_a_drawn_token_is_among_its_top_logprobs(client: OpenAI) -> None:
    asked: Any = {"model": "pirate", "prompt": "the", "max_tokens": 20, "temperature": 3, "seed": 5}
    for count in (0, 1, 3):
        told = client.completions.create(**asked, logprobs=count, extra_body={"ignore_eos": True}).choices[0].logprobs
        assert told is not None and told.tokens and told.top_logprobs and told.token_logprobs
        sizes = set()
        for token, top, value in zip(told.tokens, told.top_logprobs, told.token_logprobs, strict=True):
            assert top is not None and top[token] == value
            sizes.add(len(top))
        assert sizes <= {max(1, count), count + 1} and count + 1 in sizes


def test_errors_are_the_client_s_own_classes(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="nobody", prompt="x")
    assert missing.value.code == "model_not_found"
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "nothing"}}}
    messages: Any = CHAT
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="demo_model", messages=messages, tools=[tool], tool_choice="required")
    assert refused.value.param == "tools"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="demo_model", prompt="What is " * 400)
    assert "--max-model-len 256" in long.value.message


def ask_fake(engines: FakeEngines, ask: Callable[[AsyncOpenAI], Any], key: str = "", **options: Any) -> Any:
    """What OpenAI's client makes of an application over these engines."""

    async def scene() -> Any:
        app = build_app(engines, NoAuth(key), CompositeObserver(Metrics()), GatewaySettings())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app)) as http:
            return await ask(
                AsyncOpenAI(base_url="http://localhost/v1", http_client=http, **{"api_key": "key"} | options)
            )

    return asyncio.run(scene())


async def complete(client: AsyncOpenAI) -> str:
    return (await client.completions.create(model="base", prompt="x", max_tokens=2)).choices[0].text


@pytest.mark.parametrize("code", ["overloaded", "loading"])
def test_the_client_tries_again_when_it_is_told_to(code: str) -> None:
    engines = FakeEngines()
    engines.problem = lambda request: OverloadedError("busy", code, 0.1) if len(engines.asked) < 2 else None
    assert ask_fake(engines, complete, max_retries=1) == "a b "
    assert len(engines.asked) == 2
    engines = FakeEngines()
    engines.problem = lambda request: OverloadedError("busy", code, 0.1)
    kind = openai.RateLimitError if code == "overloaded" else openai.InternalServerError
    with pytest.raises(kind):
        ask_fake(engines, complete, max_retries=0)


def test_a_wrong_key_is_an_authentication_error() -> None:
    with pytest.raises(openai.AuthenticationError):
        ask_fake(FakeEngines(), complete, key="right", api_key="wrong", max_retries=0)
    assert ask_fake(FakeEngines(), complete, key="right", api_key="right") == "a b "


def test_an_error_in_the_middle_of_a_stream_is_raised() -> None:
    engines = FakeEngines()
    engines.late = OverloadedError("chunks were not read", "slow_reader")

    async def stream(client: AsyncOpenAI) -> None:
        async for _ in await client.completions.create(model="base", prompt="x", stream=True):
            pass

    with pytest.raises(openai.APIError, match="chunks were not read"):
        ask_fake(engines, stream, max_retries=0)
