"""With speculation the tokens are the same, to the bit, and come in fewer steps: over prompts with repeats and mixed
adapters, greedy and sampled, with everything that a request may ask for, and over the demo model.
"""

import random
import re
from typing import Any

import pytest
import sidestream
from sidestream import LLM, OptionError, RequestError, RequestOutput, SamplingParams
from sidestream.graphs.config import LlamaConfig
from sidestream.tools.bench.random_model import TINY, write_model
from support.drafts import with_repeats
from support.eagle import eagle_head
from support.tiny import tiny_llama

OPTIONS: dict[str, Any] = {"device": "cpu", "show_progress": False}
MAX_LEN = 224


@pytest.fixture(scope="module")
def adapters(tmp_path_factory) -> dict[str, str]:
    return write_model(tmp_path_factory.mktemp("tiny"), TINY, 3, 8)


def tiny(adapters, **options) -> LLM:
    return LLM(
        TINY,
        adapters,
        load_format="dummy",
        max_loras=3,
        max_num_seqs=5,
        max_model_len=MAX_LEN,
        **{"enable_prefix_caching": False, **OPTIONS, **options},
    )


def requests(adapters) -> tuple[list[list[int]], list[SamplingParams], list[str | None]]:
    """Prompts with repeats, of mixed adapters: a third greedy, a third sampled, and one of each thing to ask for."""
    source = random.Random(11)
    prompts = [with_repeats(source, source.randrange(8, 90), 400) for _ in range(15)]
    further: list[dict[str, Any]] = [
        {"logprobs": 2},
        {"min_tokens": 6, "stop_token_ids": list(range(0, 500, 9))},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"logit_bias": {7: 5.0, 9: 4.0}},
        {"allowed_token_ids": [3, 5, 8, 13, 21]},
        {"prompt_logprobs": 1, "logprobs": 0},
        {"n": 2},
        {"max_tokens": None},
    ]
    params = []
    for index in range(len(prompts)):
        fields: dict[str, Any] = {"max_tokens": 12 + index, "ignore_eos": True, "temperature": 0}
        if index % 3 == 1:
            fields |= {"temperature": 0.4, "top_k": 4, "seed": index}
        if index % 3 == 2:
            fields |= {"temperature": 0.8, "top_p": 0.4, "min_p": 0.02, "seed": -index}
        params.append(SamplingParams(**fields | (further[index - 6] if 6 <= index < 14 else {})))
    return prompts, params, [source.choice([None, *adapters]) for _ in prompts]


def told(outputs: list[RequestOutput]) -> list[Any]:
    """All that a caller sees of the tokens."""
    return [
        [
            (each.token_ids, each.text, each.logprobs, each.cumulative_logprob, each.finish_reason, each.stop_reason)
            for each in output.outputs
        ]
        + [output.prompt_logprobs]
        for output in outputs
    ]


@pytest.fixture(scope="module")
def plain(adapters) -> list[Any]:
    return told(tiny(adapters).generate(*requests(adapters), use_tqdm=False))


@pytest.mark.parametrize(("speculation", "ahead", "pages"), [(3, 0, None), (7, 2, 4)])
def test_the_same_tokens_in_fewer_steps(adapters, plain, speculation, ahead, pages):
    """Plans are made `ahead` of results, as on a GPU; of four pages sequences are put back with drafts in flight."""
    llm = tiny(adapters, speculation=speculation, num_kv_pages=pages)
    llm.engine._depth = ahead
    outputs = llm.generate(*requests(adapters), use_tqdm=False)
    assert told(outputs) == plain
    stats = llm.engine.scheduler.stats()
    assert stats.drafted == sum(output.num_draft_tokens for output in outputs)
    assert stats.accepted == sum(output.num_accepted_tokens for output in outputs)
    assert 0.05 * stats.drafted < stats.accepted < stats.drafted
    assert stats.pages_used == 0 and llm.engine.scheduler.states.rows.num_free == 5
    assert bool(stats.preemptions) == bool(pages)
    edited = outputs[7:11]
    assert not any(output.num_draft_tokens for output in edited), "their tokens depend on more than those before"


def test_a_trained_draft_changes_no_token(adapters, plain, tmp_path):
    """One of random weights, with prompts in chunks, found prefixes, few pages, and plans ahead of results."""
    head = eagle_head(tmp_path, LlamaConfig.from_dict(TINY), vocabulary=96)
    options = {"num_kv_pages": 5, "max_num_batched_tokens": 24, "enable_prefix_caching": True}
    llm = tiny(adapters, speculation=3, draft=head, **options)
    llm.engine._depth = 2
    prompts, params, chosen = requests(adapters)
    outputs = llm.generate(prompts, params, chosen, use_tqdm=False)
    assert told(outputs) == plain
    place = next(place for place, prompt in enumerate(prompts) if len(prompt) > 70 and place < 6)
    again = [llm.generate(prompts[place], params[place], chosen[place], use_tqdm=False)[0] for _ in range(2)]
    assert told(again) == [plain[place]] * 2
    stats = llm.engine.scheduler.stats()
    assert stats.preemptions and stats.prefix_hits
    assert 0 < stats.trained_drafted == sum(output.num_trained_draft_tokens for output in (*outputs, *again))
    assert stats.trained_drafted + stats.history_drafted < stats.drafted, "long repeats are known better"
    assert not any(output.num_draft_tokens for output in outputs[7:11])


def test_a_stop_string_cuts_what_held_after_it(tmp_path):
    """The text ends where it would end without drafts, streamed or whole, wherever in a step's tokens it falls."""
    base = tiny_llama(tmp_path, tokenizer=True)
    llm = LLM(base.path, speculation=7, max_model_len=MAX_LEN, max_num_seqs=4, **OPTIONS)
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    repeats = "one two one two one two one two "
    (long,) = llm.generate(repeats, SamplingParams(**fields, speculation="off"), use_tqdm=False)
    text, behind = long.outputs[0].text, 0
    for start in range(len(text) // 4, len(text) - 2, max(1, len(text) // 8)):
        stop = text[start : start + 2]
        (plain,) = llm.generate(repeats, SamplingParams(**fields, stop=stop, speculation="off"), use_tqdm=False)
        (drafted,) = llm.generate(repeats, SamplingParams(**fields, stop=stop), use_tqdm=False)
        assert told([drafted]) == told([plain]) and drafted.outputs[0].finish_reason == "stop"
        parts = list(llm.stream(repeats, SamplingParams(**fields, stop=stop)))
        assert "".join(part.text for part in parts) == plain.outputs[0].text
        assert [token for part in parts for token in part.token_ids] == plain.outputs[0].token_ids
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + ["stop"]
        # an accepted draft is a token more than steps, so some of these strings end in the midst of a step's tokens
        behind += drafted.num_accepted_tokens
    assert behind > 0


def test_the_demo_model_with_its_adapters():
    """Of one engine, requests with drafts next to the same ones without; one is constrained."""
    llm = LLM(speculation=3, max_model_len=256, max_num_seqs=8, **OPTIONS)
    llm.engine._depth = 1
    names = [None, *llm.adapters, None]
    free = len(names) - 1
    prompts = [
        f"{index}. What is the capital of France? The capital of France is Paris. {index}. What is the capital"
        for index in range(len(names))
    ]
    answers = []
    for option in (None, "auto", "off"):
        params = [
            SamplingParams(max_tokens=24, temperature=index % 2 * 0.7, seed=index, speculation=option)
            for index in range(free)
        ]
        params.append(SamplingParams(temperature=0, speculation=option, structured_outputs={"regex": "[a-z]{12}"}))
        answers.append(llm.generate(prompts, params, names, use_tqdm=False))
    always, adaptive, off = answers
    assert told(always) == told(adaptive) == told(off)
    accepted = [sum(output.num_accepted_tokens for output in some) for some in answers]
    assert re.fullmatch("[a-z]{12}", always[free].outputs[0].text) and always[free].num_draft_tokens > 0
    assert accepted[0] > 0 and accepted[1] > 0 and accepted[2] == 0


def test_what_cannot_be_asked_for(adapters):
    for value in (0, 8, True, "on", 2.0):
        with pytest.raises(OptionError, match="speculation="):
            sidestream.LLM(TINY, load_format="dummy", speculation=value, **OPTIONS)
        with pytest.raises(RequestError, match="speculation="):
            SamplingParams(speculation=value)
    with pytest.raises(RequestError, match="started with speculation"):
        tiny(adapters).generate([[1, 2, 3]], SamplingParams(speculation="auto"), use_tqdm=False)
