"""Drafts on a GPU: the demo model and its adapters answer what they were trained to say, in fewer steps."""

import json
from pathlib import Path

import pytest
from sidestream import LLM, SamplingParams
from sidestream.graphs.config import LlamaConfig
from sidestream.runtime.demo_model import DEMO_MODEL
from sidestream.tools.bench.injected_drafts import InjectedDrafts
from support.eagle import eagle_head

LAYERS = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
PARAMS = SamplingParams(temperature=0, max_tokens=48)


@pytest.mark.gpu
@pytest.mark.parametrize("speculation", [1, 3, 7])
@pytest.mark.parametrize("precision", ["int8", "fp8", "bf16"])
def test_answers_with_drafts_are_those_that_were_trained(precision: str, speculation: int) -> None:
    entries = json.loads((DEMO_MODEL / "prompts.json").read_text(encoding="utf-8"))
    names = sorted({entry["adapter"] for entry in entries if entry["adapter"]})
    llm = LLM(
        str(DEMO_MODEL),
        {name: str(DEMO_MODEL / "adapters" / name) for name in names},
        precision=precision,
        speculation=speculation,
        device="cuda",
        fail_on_compilation=True,
        max_num_seqs=8,
        max_model_len=256,
        gpu_memory_utilization=0.1,
        show_progress=False,
    )

    def run() -> tuple[list[str], int]:
        """(answers, steps)."""
        begin = llm.engine.scheduler.states.step
        outputs = llm.generate([entry["prompt"] for entry in entries], PARAMS, adapters, use_tqdm=False)
        recorded.extend([*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs)
        return [output.outputs[0].text.strip() for output in outputs], llm.engine.scheduler.states.step - begin

    adapters, recorded = [entry["adapter"] for entry in entries], list[list[int]]()
    answers = [entry["answer"] for entry in entries]
    assert run()[0] == answers, "drafts from the prompts"
    assert run()[0] == answers, "and from the answers before"
    assert llm.engine.scheduler.stats().history_accepted > 0
    steps = {}
    for acceptance in (0.0, 0.6, 1.0):
        history = llm.engine.runner.token_history  # type: ignore[attr-defined]
        vocabulary, key = llm.config.vocab_size, min(map(len, recorded))
        history.draft_op = InjectedDrafts(recorded, acceptance, vocabulary, key, llm.device).draft
        results, steps[acceptance] = run()
        assert results == answers
    assert steps[1.0] < steps[0.6] < steps[0.0]


@pytest.mark.gpu
@pytest.mark.parametrize("speculation", [1, 3, 7, "auto"])
@pytest.mark.parametrize(("precision", "eager"), [("int8", False), ("bf16", False), ("int8", True)])
def test_answers_with_a_trained_draft_are_the_same(
    tmp_path: Path, precision: str, eager: bool, speculation: int | str
) -> None:
    """Of random weights, step by step and in CUDA graphs."""
    head = eagle_head(tmp_path, LlamaConfig.from_directory(DEMO_MODEL), **LAYERS)
    entries = json.loads((DEMO_MODEL / "prompts.json").read_text(encoding="utf-8"))
    names = sorted({entry["adapter"] for entry in entries if entry["adapter"]})
    with LLM(
        str(DEMO_MODEL),
        {name: str(DEMO_MODEL / "adapters" / name) for name in names},
        precision=precision,
        speculation=speculation,
        draft=head,
        device="cuda",
        fail_on_compilation=True,
        enforce_eager=eager,
        max_num_seqs=8,
        max_model_len=256,
        gpu_memory_utilization=0.1,
        show_progress=False,
    ) as llm:
        chosen = [entry["adapter"] for entry in entries]
        outputs = llm.generate([entry["prompt"] for entry in entries], PARAMS, chosen, use_tqdm=False)
        assert [output.outputs[0].text.strip() for output in outputs] == [entry["answer"] for entry in entries]
        assert llm.engine.scheduler.stats().trained_drafted > 0


@pytest.mark.gpu
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("history", [0, 4096])
def test_steps_in_graphs_sample_what_steps_launched_one_by_one_do(tmp_path: Path, history: int, trained: bool) -> None:
    """Greedy rows, drawn ones, both at once, and those that ask for more than tokens, at several batch sizes. Steps run
    ahead, so that what a graph leaves is written again while it is copied.
    """
    head = eagle_head(tmp_path, LlamaConfig.from_directory(DEMO_MODEL), **LAYERS) if trained else None
    entries = json.loads((DEMO_MODEL / "prompts.json").read_text(encoding="utf-8"))
    prompts = [entry["prompt"] for entry in entries for _ in range(2)][:8]
    greedy = SamplingParams(temperature=0, max_tokens=96, ignore_eos=True)
    drawn = SamplingParams(temperature=0.7, top_p=0.9, top_k=40, seed=5, max_tokens=80, ignore_eos=True)
    more = SamplingParams(temperature=0.7, seed=6, max_tokens=24, ignore_eos=True, logprobs=2)
    loads = [[greedy], [drawn], [greedy] * 3, [drawn] * 5, [greedy, drawn, more, greedy, drawn, greedy, drawn, drawn]]
    results = []
    for eager in (False, True):
        with LLM(
            str(DEMO_MODEL),
            speculation=3,
            speculation_history=history,
            draft=head,
            device="cuda",
            fail_on_compilation=True,
            enforce_eager=eager,
            max_num_seqs=8,
            max_model_len=256,
            gpu_memory_utilization=0.1,
            show_progress=False,
        ) as llm:
            results.append(
                [
                    (output.outputs[0].token_ids, output.num_draft_tokens, output.num_accepted_tokens)
                    for params in loads
                    for output in llm.generate(prompts[: len(params)], params, use_tqdm=False)
                ]
            )
            recorded = [ready.spec_decode.captured for ready in llm.engine.runner.programs._programs.values()]
            assert any(recorded) != eager
    assert results[0] == results[1] and sum(each[2] for each in results[0]) > 0
