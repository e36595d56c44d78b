"""Constrained answers with drafts: the tokens are those without, and no draft holds that leaves the grammar."""

import json
import random
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest
import regex
import torch
from sidestream import LLM, RequestOutput, SamplingParams
from sidestream.ops.spec_decode.draft_ngram import LONGEST
from sidestream.runtime.api.structured_outputs import StructuredOutputsParams
from sidestream.runtime.text.structured import draft_masks as drafted
from sidestream.runtime.text.structured import mask_filling, matcher
from sidestream.runtime.text.structured.draft_masks import fill_drafted
from sidestream.runtime.text.structured.grammar_compiler import GrammarCompiler
from sidestream.runtime.text.structured.mask_filling import consume_outputs
from sidestream.runtime.text.tokenizer import load_tokenizer
from sidestream.tools.bench.injected_drafts import InjectedDrafts
from support.tiny import AdapterSpec, TinyBase, tiny_adapters, tiny_llama

PATTERNS = (r"([a-f]{2}[0-9]|[g-z ]{1,3}x)+\.[A-Z]{4}", "[a-d]{3}-[0-9]{2,5}", "yes|no|noon")
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
END = 257
OPTIONS: dict[str, Any] = {"device": "cpu", "show_progress": False, "max_model_len": 256, "max_num_seqs": 6}


@pytest.fixture(autouse=True)
def time_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """For masks after drafts, however busy the machine is."""
    monkeypatch.setattr(drafted, "DRAFT_SECONDS", 60.0)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TinyBase:
    return tiny_llama(tmp_path_factory.mktemp("model"), tokenizer=True)


@pytest.fixture(scope="module")
def adapters(base: TinyBase) -> dict[str, str]:
    specs = [AdapterSpec(rank=4), AdapterSpec(rank=8, targets=("q_proj", "down_proj"))]
    return dict(zip(("one", "two"), tiny_adapters(base, specs), strict=True))


@pytest.fixture(scope="module")
def llm(base: TinyBase, adapters: dict[str, str]) -> LLM:
    return LLM(base.path, adapters, precision="fp32", speculation=7, max_loras=2, **OPTIONS)


def results_of(outputs: list[RequestOutput]) -> list[Any]:
    return [
        (each.token_ids, each.text, each.logprobs, each.finish_reason, each.stop_reason)
        for output in outputs
        for each in output.outputs
    ]


def told_drafts(*drafts: int) -> Any:
    """In place of `draft_ngram`: always these."""

    def draft(_history: Any, _lengths: Any, rows: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return rows.new_tensor((drafts * count)[:count]).repeat(len(rows), 1), torch.full_like(rows, LONGEST)

    return draft


def recorded(llm: LLM, outputs: list[RequestOutput], acceptance: float) -> Any:
    """The same: what these outputs say, each token with this probability."""
    answers = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]
    key = min(len(output.prompt_token_ids) for output in outputs)
    return InjectedDrafts(answers, acceptance, llm.config.vocab_size, key, llm.device).draft


@pytest.mark.parametrize("pattern", PATTERNS)
def test_masks_after_drafts_are_what_the_pattern_allows(base: TinyBase, pattern: str) -> None:
    """By another implementation of regular expressions: a byte is allowed where the pattern can still match."""
    compiler = GrammarCompiler(load_tokenizer(base.path), 258, {END})
    whole, chance = regex.compile(pattern), random.Random(pattern)

    def allowed(text: bytes) -> set[int]:
        byte = {byte for byte in range(128) if whole.fullmatch((text + bytes([byte])).decode(), partial=True)}
        return byte | ({END} if whole.fullmatch(text.decode()) else set())

    def some_text(length: int) -> bytes:
        text = b""
        while len(text) < length and (choices := allowed(text) - {END}):
            text += bytes([chance.choice(sorted(choices))])
        return text

    grammar = compiler.compile(StructuredOutputsParams(regex=pattern))
    matchers = [grammar.matcher() for _ in range(12)]
    texts, drafts = [some_text(chance.randrange(6)) for _ in matchers], list[list[int]]()
    for number, text in enumerate(texts):
        right = list(some_text(20)) if not text else [chance.choice(sorted(allowed(text)))]
        drafts.append([*right[: 3 + number % 4], *([END, 97] if number % 3 else [])][:7])
    for _ in range(2):  # the second time from where the first one has left the matchers
        consume_outputs(matchers, [(list(text), 0) for text in texts], in_parallel=False)
        of, places, words = fill_drafted(matchers, drafts, lambda going, *_: [True] * len(going))
        bits = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=1, bitorder="little")
        found = {
            (index, place): set(np.flatnonzero(row).tolist())
            for index, place, row in zip(of.tolist(), places.tolist(), bits, strict=True)
        }
        expected = {}
        for index, text in enumerate(texts):
            for place in range(1 + len(drafts[index])):
                expected[index, place] = allowed(text)
                if place == len(drafts[index]) or drafts[index][place] not in allowed(text) - {END}:
                    break
                text += bytes([drafts[index][place]])
        assert found == expected and len(expected) > len(texts)
    compiler.close()


def requests() -> tuple[list[str], list[SamplingParams], list[str | None]]:
    """Constrained ones of each kind next to free ones, greedy and drawn, of mixed adapters."""
    further: list[dict[str, Any]] = [
        {"structured_outputs": {"regex": "([a-d]{3}[0-9])+"}},
        {"structured_outputs": {"regex": "([a-d]{3}[0-9])+"}, "temperature": 2.0, "n": 2},
        {"structured_outputs": {"regex": PATTERNS[0]}, "logprobs": 1, "ignore_eos": True},
        {"structured_outputs": {"choice": ["yes", "no", "noon, or so"]}, "ignore_eos": True},
        {"structured_outputs": {"json": PERSON}, "temperature": 0.8, "top_k": 20},
        {"structured_outputs": {"regex": "[a-d]{40}"}, "stop": ["aa", "bd"]},
        {"structured_outputs": {"regex": "[a-d]{40}"}, "stop_token_ids": [ord("d")], "temperature": 1.5},
        {"structured_outputs": {"regex": "[a-d]{40}"}, "logit_bias": {ord("c"): 2.0}},
        {"structured_outputs": {"regex": "[a-d]*"}, "min_tokens": 3},
        {"temperature": 0.7},
        {"ignore_eos": True},
    ]
    params = [SamplingParams(**{"temperature": 0, "seed": 7, "max_tokens": 40} | fields) for fields in further]
    prompts = [f"{number:02} dab1 dab1 dab1 yes, no" for number in range(len(params))]
    return prompts, params, [(None, "one", "two")[number % 3] for number in range(len(params))]


@pytest.mark.parametrize(("ahead", "injected"), [(0, None), (1, 0.7)])
def test_the_same_tokens_with_drafts(llm: LLM, ahead: int, injected: float | None) -> None:
    prompts, params, names = requests()
    plain = llm.generate(prompts, [replace(each, speculation="off") for each in params], names, use_tqdm=False)
    history = llm.engine.runner.token_history
    ngrams, llm.engine._depth = history.draft_op, ahead
    if injected is not None:
        history.draft_op = recorded(llm, plain, injected)
    try:
        outputs = llm.generate(prompts, params, names, use_tqdm=False)
    finally:
        history.draft_op, llm.engine._depth = ngrams, 0
    assert results_of(outputs) == results_of(plain)
    accepted = [output.num_accepted_tokens for output in outputs]
    drafts = [output.num_draft_tokens for output in outputs]
    assert all(drafts[:7]) and sum(held > 0 for held in accepted[:7]) > 4 and sum(accepted) < sum(drafts)
    assert not any(drafts[7:9]), "something about their logits is edited"


def test_it_survives_preemption_and_aborts(base: TinyBase) -> None:
    """Pages for less than all of them; a stream next to them is left in its midst."""
    params = SamplingParams(temperature=0, max_tokens=90, structured_outputs={"regex": "([a-d]{3}[0-9])+"})
    prompts = [f"To be, or not to be: that is the question {letter}" for letter in "abcd"]
    found = []
    for option, pages in (("off", 12), (3, 5)):
        llm = LLM(base.path, precision="fp32", speculation=option, num_kv_pages=pages, **OPTIONS)
        llm.engine._depth = 1
        stream = llm.stream(prompts[0], params)
        next(stream)
        stream.close()
        found.append(results_of(llm.generate(prompts, params, use_tqdm=False)))
    stats = llm.engine.scheduler.stats()
    assert found[0] == found[1] and stats.preemptions > 0 and stats.accepted > 0 and stats.pages_used == 0


def test_the_demo_model_with_its_adapters_under_auto() -> None:
    llm = LLM(speculation="auto", **OPTIONS)
    names = [None, *llm.adapters][:3]
    prompts = ['{"name": "Paris", "age": 7} is what I want. {"name": "Paris", "age": 7}'] * 6
    params = [
        SamplingParams(temperature=0.6 * (index > 2), seed=index, max_tokens=64, structured_outputs={"json": PERSON})
        for index in range(6)
    ]
    outputs = llm.generate(prompts, params, names * 2, use_tqdm=False)
    off = [replace(each, speculation="off") for each in params]
    assert results_of(outputs) == results_of(llm.generate(prompts, off, names * 2, use_tqdm=False))
    complete = [each.outputs[0].text for each in outputs if each.outputs[0].finish_reason == "stop"]
    for text in complete:
        jsonschema.validate(json.loads(text), PERSON)
    assert len(complete) > 3 and sum(output.num_accepted_tokens for output in outputs) > 0


def test_drafts_are_cut_where_they_leave_the_grammar(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text before is repeated, and would end in what is not allowed."""
    places = []
    constrain = llm.engine.runner.constrain

    def noted(handle: Any, masks: Any) -> None:
        places.append(masks.places.tolist())
        constrain(handle, masks)

    monkeypatch.setattr(llm.engine.runner, "constrain", noted)
    monkeypatch.setattr(llm.engine.runner.token_history, "draft_op", told_drafts(*b"abz"))
    params = SamplingParams(temperature=0, max_tokens=24, structured_outputs={"regex": "(ab|ba|cc)*"})
    (output,) = llm.generate(["abzabzabz"], params, use_tqdm=False)
    (plain,) = llm.generate(["abzabzabz"], replace(params, speculation="off"), use_tqdm=False)
    assert results_of([output]) == results_of([plain])
    # after "b" the draft "a" completes a pair, and then "b" begins one
    assert {tuple(each) for each in places} <= {(0,), (0, 1), (0, 1, 2)} and [0, 1, 2] in places
    assert output.num_accepted_tokens <= 2 * output.num_draft_tokens / 7


def test_masks_that_come_too_late_cut_drafts_and_change_no_token(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, structured_outputs={"regex": "[a-d]{30}"})
    plain = llm.generate(["abc"], replace(params, speculation="off"), use_tqdm=False)
    monkeypatch.setattr(llm.engine.runner.token_history, "draft_op", recorded(llm, plain, 1.0))
    (right,) = llm.generate(["abc"], params, use_tqdm=False)
    assert results_of([right]) == results_of(plain) and right.num_accepted_tokens > 20
    monkeypatch.setattr(drafted, "DRAFT_SECONDS", -1.0)
    (late,) = llm.generate(["abc"], params, use_tqdm=False)
    assert results_of([late]) == results_of(plain) and late.num_accepted_tokens == 0 < late.num_draft_tokens


@pytest.mark.parametrize("few", [0, 8])
def test_slow_masks_end_a_request_as_soon_as_without_drafts(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, few: int
) -> None:
    """Filled by several threads or by one."""
    monkeypatch.setattr(mask_filling, "FEW", few)
    monkeypatch.setattr(drafted, "FEW", few)
    monkeypatch.setattr(matcher, "SLOW_SECONDS", -1.0)
    params = SamplingParams(temperature=0, max_tokens=30, structured_outputs={"regex": "[a-d]{30}"})
    free = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    outputs = [
        llm.generate(["abc", "abd", "free"], [replace(each, speculation=option) for each in (params, params, free)])
        for option in ("off", None)
    ]
    assert results_of(outputs[0]) == results_of(outputs[1])
    assert [each[3] for each in results_of(outputs[1])] == ["error", "error", "length"]
    assert "takes more than" in results_of(outputs[1])[0][4]
