"""Constrained answers with drafts on a GPU: masks for several rows of a sequence reach the steps that verify them."""

import json
from typing import Any

import pytest
from sidestream import LLM, SamplingParams
from sidestream.runtime.demo_model import DEMO_MODEL
from sidestream.tools.bench.injected_drafts import InjectedDrafts

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}


def check(**options: Any) -> None:
    """The demo model and its adapters say what they were trained to say where they may say only that, with drafts of
    any acceptance and in the fewer steps the more of them hold; other forms next to them fit.
    """
    pytest.importorskip("llguidance")
    entries = json.loads((DEMO_MODEL / "prompts.json").read_text(encoding="utf-8"))
    names = sorted({entry["adapter"] for entry in entries if entry["adapter"]})
    places = {name: str(DEMO_MODEL / "adapters" / name) for name in names}
    llm = LLM(
        str(DEMO_MODEL),
        places,
        max_num_seqs=8,
        max_model_len=256,
        show_progress=False,
        fail_on_compilation=True,
        **options,
    )
    answers = [entry["answer"] for entry in entries]
    (first,) = llm.generate(entries[0]["prompt"], SamplingParams(temperature=0, max_tokens=48), use_tqdm=False)
    before = first.outputs[0].text.removesuffix(first.outputs[0].text.lstrip())  # an answer may begin with a space
    choice = {"choice": [before + answer for answer in sorted(set(answers))]}
    trained = SamplingParams(temperature=0, max_tokens=48, structured_outputs=choice)
    form = {"json": CITY, "disable_any_whitespace": True}
    drawn = [SamplingParams(temperature=0.8, seed=seed, max_tokens=96, structured_outputs=form) for seed in range(4)]
    prompts = [entry["prompt"] for entry in entries] + [entries[0]["prompt"]] * len(drawn)
    adapters = [entry["adapter"] for entry in entries] + [None, *names, None][: len(drawn)]
    params, recorded = [trained] * len(entries) + drawn, list[list[int]]()

    def run() -> tuple[list[str], int, int]:
        """(trained answers, steps, accepted drafts)."""
        begin = llm.engine.scheduler.states.step
        outputs = llm.generate(prompts, params, adapters, use_tqdm=False)
        recorded.extend([*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs)
        texts = [output.outputs[0].text.strip() for output in outputs]
        for text in texts[len(entries) :]:
            assert json.loads(text).keys() == {"city", "unit"}
        accepted = sum(output.num_accepted_tokens for output in outputs[: len(entries)])
        return texts[: len(entries)], llm.engine.scheduler.states.step - begin, accepted

    assert run()[0] == answers, "drafts from the prompts"
    assert run()[0] == answers, "and from the answers before"
    steps = {}
    for acceptance in (0.0, 1.0):
        vocabulary, key = llm.config.vocab_size, min(map(len, recorded))
        injected = InjectedDrafts(recorded, acceptance, vocabulary, key, llm.device)
        llm.engine.runner.token_history.draft_op = injected.draft  # type: ignore[attr-defined]
        texts, steps[acceptance], accepted = run()
        assert texts == answers and (accepted > 0) == (acceptance > 0)
    assert steps[1.0] < steps[0.0]


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "speculation"), [("int8", 7), ("int8", 1), ("fp8", 3), ("bf16", 7)])
def test_constrained_answers_with_drafts_are_those_that_were_trained(precision: str, speculation: int) -> None:
    check(precision=precision, speculation=speculation, device="cuda", gpu_memory_utilization=0.1)
