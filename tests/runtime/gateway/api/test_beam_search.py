"""`use_beam_search` of completions and chats: what transformers finds, within the limits of keys, and refusals."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
import torch
from sidestream.runtime.api.errors import EngineDeadError
from sidestream.runtime.demo_model import DEMO_MODEL
from sidestream.runtime.gateway.interfaces import EngineRequest
from support.beams import transformers_beams
from support.gateway import Books, FakeEngines, gateway
from support.live_server import Served

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SKY, SUM = "What is the colour of the sky?", "What is the sum of 3 and 4?"
CHATTED = [{"role": "user", "content": SKY}]


def post(served: Served, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(served.url + path, json=body, timeout=600)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.parametrize("penalty", [0.0, 2.0])
def test_answers_are_the_beams_of_transformers(served: Served, penalty: float) -> None:
    """Also of a search that is wider than `n`. The penalty is that of transformers: the end counts, not the prompt."""
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()
    fields: dict[str, Any] = {"n": 3, "best_of": 4, "max_tokens": 14, "use_beam_search": True}
    fields |= {"length_penalty": penalty, "return_token_ids": True, "prompt": [SUM, "The capital of France"]}
    answer = post(served, COMPLETIONS, **fields, logprobs=1)
    assert len(answer["choices"]) == 6
    stopped = 0
    for place in range(2):
        choices = answer["choices"][3 * place : 3 * place + 3]
        ids = choices[0]["prompt_token_ids"]
        best = transformers_beams(oracle, ids, 4, 14, [1], penalty)[:3]
        assert [ids + each["token_ids"] for each in choices] == [tokens for tokens, _ in best]
        for each, (_, score) in zip(choices, best, strict=True):
            logprobs = each["logprobs"]
            total = sum(logprobs["token_logprobs"])
            assert total / len(each["token_ids"]) ** penalty == pytest.approx(score, abs=2e-3)
            ended = each["token_ids"][-1] == 1
            assert (each["finish_reason"], each["stop_reason"]) == (("stop", 1) if ended else ("length", None))
            shown = ["" if token in ("<s>", "</s>") else token for token in logprobs["tokens"]]
            assert "".join(shown) == each["text"]
            assert logprobs["text_offset"] == [len("".join(shown[:index])) for index in range(len(shown))]
            stopped += ended
    assert stopped
    (echoed,) = post(served, COMPLETIONS, prompt=SUM, echo=True, max_tokens=1, use_beam_search=True)["choices"]
    assert echoed["text"].startswith(SUM) and len(echoed["text"]) > len(SUM)


def test_one_beam_is_the_greedy_answer(served: Served) -> None:
    greedy = {"temperature": 0, "max_tokens": 16, "model": "pirate", "return_token_ids": True}
    for path, body in ((COMPLETIONS, {"prompt": SKY}), (CHAT, {"messages": CHATTED})):
        (one,) = post(served, path, **body, **greedy)["choices"]
        (beam,) = post(served, path, **body, **greedy, use_beam_search=True)["choices"]
        assert beam["token_ids"] == one["token_ids"] and beam["finish_reason"] == one["finish_reason"]
        assert beam.get("text") == one.get("text") and beam.get("message") == one.get("message")
    search = {"n": 2, "max_tokens": 4, "ignore_eos": True, "use_beam_search": True}
    usage = post(served, CHAT, messages=CHATTED, **search)["usage"]
    assert usage["completion_tokens"] == 1 + 3 * 2, "one token of each continuation in each step"


def scene(run: Callable[[httpx.AsyncClient, FakeEngines, Books], Any], **books: Any) -> tuple[FakeEngines, Books]:
    async def play() -> tuple[FakeEngines, Books]:
        engines, admission = FakeEngines(), CountingBooks(**books)
        engines.info = replace(engines.info, eos_token_ids=(255,))
        async with gateway(engines, admission) as http:
            await run(http, engines, admission)
        return engines, admission

    return asyncio.run(play())


class CountingBooks(Books):
    """Also keeps what was reserved: completions and tokens of each."""

    def admit(
        self, caller: Any, model: str, prompt_tokens: int, max_tokens: int | None, choices: int, model_len: int
    ) -> Any:
        self.reserved = choices, max_tokens
        return super().admit(caller, model, prompt_tokens, max_tokens, choices, model_len)


def test_the_whole_width_counts_for_the_limits_of_a_key() -> None:
    async def run(http: httpx.AsyncClient, engines: FakeEngines, books: Any) -> None:
        body = {"prompt": ["a", "b"], "n": 2, "best_of": 5, "max_tokens": 9, "use_beam_search": True}
        answer = await http.post(COMPLETIONS, json=body)
        assert answer.status_code == 200 and len(answer.json()["choices"]) == 4, answer.text
        assert books.reserved == (10, 9)

    engines, books = scene(run, limit=3)
    assert [each.output_tokens for each in books.records] == [2 * (1 + 2 * 5)], "the key's max_tokens is 3"
    widths = [each.params.n for each in engines.asked if len(each.continues) == each.params.n]
    assert widths and set(widths) == {5} and all(each.params.logprobs == 10 for each in engines.asked)


def test_a_client_that_leaves_ends_the_search_and_pays_for_its_steps() -> None:
    async def run(http: httpx.AsyncClient, engines: FakeEngines, books: Books) -> None:
        def stall(request: EngineRequest) -> None:
            if len(engines.asked) == 3:
                engines.gate.clear()

        engines.problem = stall  # type: ignore[assignment]
        body = {"prompt": "a", "n": 2, "max_tokens": 9, "use_beam_search": True}
        asking = asyncio.create_task(http.post(COMPLETIONS, json=body))
        while len(engines.asked) < 4:
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        while not books.records:
            await asyncio.sleep(0)
        assert engines.left == [engines.asked[3].request_id] and len(engines.asked) == 4

    _, books = scene(run)
    assert [(each.status, each.output_tokens) for each in books.records] == [(499, 1 + 2 + 2)]


def test_an_error_of_a_step_ends_the_search() -> None:
    async def run(http: httpx.AsyncClient, engines: FakeEngines, books: Books) -> None:
        engines.problem = lambda request: EngineDeadError("gone", "engine_dead") if request.continues else None
        answer = await http.post(CHAT, json={"messages": CHATTED, "n": 2, "max_tokens": 9, "use_beam_search": True})
        assert answer.status_code == 503 and len(engines.asked) == 2

    scene(run)


@pytest.mark.parametrize(
    ("fields", "param", "remedy"),
    [
        ({"stream": True}, "stream", "leave one out"),
        ({"n": 11}, "n", "at most 10"),
        ({"n": 2, "best_of": 1}, "best_of", "at least n=2"),
        ({"n": 2, "best_of": 11}, "best_of", "at most 10"),
        ({"n": 8}, "n", "--max-logprobs 16"),
        ({"length_penalty": 11}, "length_penalty", "10"),
        ({"stop": "x"}, "stop", "leave one out"),
        ({"logit_bias": {"3": 1}}, "logit_bias", "leave one out"),
        ({"presence_penalty": 0.5}, "presence_penalty", "leave one out"),
        ({"repetition_penalty": 1.5}, "repetition_penalty", "leave one out"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs", "leave one out"),
        ({"logprobs": 1, "logprob_token_ids": [3]}, "logprob_token_ids", "leave one out"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", "leave one out"),
        ({"echo": True, "logprobs": 1}, "echo", "leave one out"),
        ({"echo": True, "max_tokens": 0}, "echo", "leave one out"),
        ({"use_beam_search": False, "best_of": 2}, "best_of", "use n"),
    ],
)
def test_fields_that_do_not_go_together_are_refused(fields: dict[str, Any], param: str, remedy: str) -> None:
    async def run(http: httpx.AsyncClient, engines: FakeEngines, books: Books) -> None:
        engines.info = replace(engines.info, max_logprobs=15)
        answer = await http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 2, "use_beam_search": True} | fields)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param) and remedy in error["message"], error
        assert not engines.asked

    scene(run)


def test_values_without_an_effect_and_other_endpoints() -> None:
    async def run(http: httpx.AsyncClient, engines: FakeEngines, books: Books) -> None:
        neutral = {"presence_penalty": 0, "repetition_penalty": 1, "stop": [], "early_stopping": True, "tools": []}
        body = {"messages": CHATTED, "max_tokens": 2, "use_beam_search": True}
        assert (await http.post(CHAT, json=body | neutral)).status_code == 200
        for path, other in (
            (f"{CHAT}/render", body),
            (f"{COMPLETIONS}/render", {"prompt": "a", "use_beam_search": True}),
            (f"{CHAT}/batch", body | {"messages": [CHATTED]}),
            ("/v1/responses", {"input": "a", "use_beam_search": True}),
        ):
            answer = await http.post(path, json=other)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "use_beam_search"), path

    scene(run)
