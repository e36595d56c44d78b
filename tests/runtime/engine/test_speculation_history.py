"""Drafts from former answers of the same adapter: more of a second answer is foreseen than of the first, the tokens
are the same, and neither another adapter nor a new content under the same name knows of them.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from sidestream import LLM, RequestOutput, SamplingParams
from sidestream.runtime.demo_model import demo_adapters
from support.tiny import tiny_llama

OPTIONS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 4, "device": "cpu", "show_progress": False}


@pytest.fixture(scope="module")
def demo() -> Iterator[LLM]:
    with LLM(speculation=3, **OPTIONS) as llm:
        yield llm


def ask(llm: LLM, country: str, adapter: str | None, **fields: Any) -> RequestOutput:
    params = SamplingParams(**{"temperature": 0, "max_tokens": 40} | fields)
    (output,) = llm.generate([f"What is the capital of {country}?"], params, [adapter], use_tqdm=False)
    return output


def rate(output: RequestOutput) -> float:
    return output.num_accepted_tokens / output.num_draft_tokens


def test_a_second_answer_is_foreseen_better_than_the_first(demo: LLM) -> None:
    for adapter in (None, "json", "yoda"):
        first, second, sampled = (
            ask(demo, "France", adapter),
            ask(demo, "Italy", adapter),
            ask(demo, "Spain", adapter, temperature=0.5, seed=3),
        )
        assert first.num_history_draft_tokens == 0, "another adapter's answers are not looked at"
        assert rate(second) > rate(first) and 0 < second.num_history_accepted_tokens <= second.num_accepted_tokens
        for output, country, how in ((second, "Italy", {}), (sampled, "Spain", {"temperature": 0.5, "seed": 3})):
            plain = ask(demo, country, adapter, speculation="off", **how)
            assert output.outputs[0].token_ids == plain.outputs[0].token_ids and plain.num_draft_tokens == 0
    stats = demo.engine.scheduler.stats()
    assert 0 < stats.history_accepted <= stats.accepted and stats.history_accepted < stats.history_drafted


def test_a_name_with_another_content_begins_with_nothing(demo: LLM) -> None:
    paths = demo_adapters()
    demo.add_adapter("mine", paths["pirate"])
    ask(demo, "France", "mine")
    assert ask(demo, "Italy", "mine").num_history_accepted_tokens > 0
    demo.add_adapter("mine", paths["shout"], replace=True)
    assert ask(demo, "Spain", "mine").num_history_draft_tokens == 0
    assert ask(demo, "France", "mine").num_history_accepted_tokens > 0
    demo.remove_adapter("mine")
    demo.add_adapter("mine", paths["shout"])
    assert ask(demo, "Italy", "mine").num_history_draft_tokens == 0, "removed, and added again"


def test_answers_at_once_with_a_short_history(tmp_path: Any) -> None:
    """Rings go round within one batch; plans are made ahead. The tokens are those without speculation."""
    base = tiny_llama(tmp_path)
    prompts = [[(7 * index + place) % 50 for place in range(6 + index % 3)] for index in range(14)]
    params = [
        SamplingParams(max_tokens=10 + index, ignore_eos=True, temperature=index % 2 * 0.4, top_k=3, seed=index % 4)
        for index in range(14)
    ]

    def tokens(**options: Any) -> tuple[list[list[int]], int]:
        with LLM(base.path, **OPTIONS, enable_prefix_caching=False, **options) as llm:
            llm.engine._depth = 2
            outputs = llm.generate(prompts, params, use_tqdm=False)
            return [output.outputs[0].token_ids for output in outputs], llm.engine.scheduler.stats().history_drafted

    plain, none = tokens()
    short, some = tokens(speculation=3, speculation_history=70)
    without, nothing = tokens(speculation=3, speculation_history=0)
    assert short == plain == without
    assert some > 0 == none == nothing
