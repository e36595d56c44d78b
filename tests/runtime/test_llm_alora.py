"""aLoRA in process: log-probabilities and tokens are those of PEFT in fp32, whatever is cached, chunked or mixed."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sidestream import LLM, BeamSearchParams
from sidestream.runtime.api.sampling_params import SamplingParams
from support.tiny import AdapterSpec, TinyBase, oracle_logits, tiny_adapters, tiny_llama

INVOCATION = [7, 8, 9]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SMALL: dict[str, Any] = {
    "device": "cpu", "show_progress": False, "precision": "fp32", "max_model_len": 512, "max_num_seqs": 6,
    "max_num_batched_tokens": 48,
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TinyBase:
    return tiny_llama(tmp_path_factory.mktemp("alora"))


@pytest.fixture(scope="module")
def adapters(base: TinyBase) -> dict[str, Path]:
    activated = {"alora_invocation_tokens": INVOCATION}
    specs = [AdapterSpec(rank=8, extra=activated), AdapterSpec(rank=4, extra=activated), AdapterSpec(rank=8)]
    return dict(zip(("alora", "other", "lora"), tiny_adapters(base, specs), strict=True))


@pytest.fixture(scope="module")
def llm(base: TinyBase, adapters: dict[str, Path]) -> Any:
    with LLM(base.path, adapters, **SMALL) as llm:
        yield llm


def text(length: int, seed: int = 0) -> list[int]:
    """Random ids without the invocation's."""
    return torch.randint(10, 250, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def peft_greedy(base: TinyBase, adapter: Path | None, prompt: list[int]) -> list[int]:
    model: Any = base.model if adapter is None else base.adapted(adapter)
    ids = torch.tensor([prompt])
    found = model.generate(input_ids=ids, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    return found[0, len(prompt) :].tolist()


def generate(llm: LLM, prompt: list[int], adapter: str | None, params: SamplingParams = GREEDY) -> Any:
    return llm.generate([prompt], params, adapter, use_tqdm=False)[0]


PROMPTS = {
    **{f"at {start}": text(start, start) + INVOCATION + text(20, 1) for start in (0, 1, 63, 64, 65, 127, 150)},
    "at the very end": text(70, 2) + INVOCATION,
    "the last token of a page": text(61, 3) + INVOCATION,
    "twice": text(66, 4) + INVOCATION + text(70, 5) + INVOCATION + text(9, 6),
    "its beginning again": text(66, 4) + INVOCATION + [7, 7, 8] + text(9, 6),
    "absent": text(140, 7),
    "shorter than it": [7, 8],
}


@pytest.mark.parametrize("case", PROMPTS)
def test_a_prompt_is_scored_and_answered_as_by_peft(
    llm: LLM, base: TinyBase, adapters: dict[str, Path], case: str
) -> None:
    prompt = PROMPTS[case]
    scored = generate(llm, prompt, "alora", replace(GREEDY, prompt_logprobs=0, skip_reading_prefix_cache=True))
    expected = oracle_logits(base, adapters["alora"], prompt).log_softmax(-1)
    entries = zip(prompt[1:], scored.prompt_logprobs[1:], strict=True)
    found = torch.tensor([entry[token].logprob for token, entry in entries])
    torch.testing.assert_close(found, expected[range(len(prompt) - 1), prompt[1:]], atol=1e-4, rtol=0)
    wanted = peft_greedy(base, adapters["alora"], prompt)
    assert scored.outputs[0].token_ids == wanted
    assert scored.adapter_active == (case not in ("absent", "shorter than it"))
    if not scored.adapter_active:
        assert wanted == peft_greedy(base, None, prompt)
    llm.reset_prefix_cache()
    cold, warm = generate(llm, prompt, "alora"), generate(llm, prompt, "alora")
    assert cold.num_cached_tokens == 0 and warm.num_cached_tokens == (len(prompt) - 1) // 64 * 64
    assert cold.outputs[0].token_ids == warm.outputs[0].token_ids == wanted


def test_the_base_and_alora_share_the_pages_before_the_invocation(llm: LLM) -> None:
    for start in (63, 64, 65, 150):
        prompt, shared = text(start, 50 + start) + INVOCATION + text(80), start // 64 * 64
        for first, second in ((None, "alora"), ("alora", None), ("alora", "other")):
            llm.reset_prefix_cache()
            generate(llm, prompt, first)
            assert generate(llm, prompt, second).num_cached_tokens == shared
        assert generate(llm, prompt, "lora").num_cached_tokens == 0


def test_kinds_of_adapters_in_one_batch_answer_as_alone(llm: LLM, base: TinyBase, adapters: dict[str, Path]) -> None:
    cases = [PROMPTS[case] for case in ("at 0", "at 65", "twice", "absent")]
    prompts = cases * 4
    names = [name for name in (None, "lora", "alora", "other") for _ in cases]
    llm.reset_prefix_cache()
    outputs = llm.generate(prompts, GREEDY, names, use_tqdm=False)
    for prompt, name, output in zip(prompts, names, outputs, strict=True):
        assert output.outputs[0].token_ids == peft_greedy(base, adapters[name] if name else None, prompt)


def test_several_completions_and_beams_keep_the_activation_of_the_prompt(llm: LLM) -> None:
    prompt = text(100, 9) + INVOCATION + text(5, 9)
    wanted = generate(llm, prompt, "alora").outputs[0].token_ids
    several = generate(llm, prompt, "alora", replace(GREEDY, n=3))
    assert [completion.token_ids for completion in several.outputs] == [wanted] * 3
    absent = text(30, 10)
    beams = [llm.beam_search([absent], BeamSearchParams(2, 3), name)[0].sequences for name in ("alora", None)]
    assert [beam.tokens for beam in beams[0]] == [beam.tokens for beam in beams[1]]


def test_generated_tokens_never_activate_or_move_the_adapter(
    base: TinyBase, adapters: dict[str, Path], tmp_path: Path
) -> None:
    """An adapter whose invocation is what the base says next; beam search makes prompts of what was generated."""
    prompt = text(40, 11)
    said = peft_greedy(base, None, prompt)
    path = Path(shutil.copytree(adapters["alora"], tmp_path / "adapter"))
    config = json.loads((path / "adapter_config.json").read_text()) | {"alora_invocation_tokens": said[:1]}
    (path / "adapter_config.json").write_text(json.dumps(config))
    with LLM(base.path, {"echo": path}, **SMALL) as llm:
        assert generate(llm, prompt, "echo").outputs[0].token_ids == said
        (beam,) = llm.beam_search([prompt], BeamSearchParams(1, 6), "echo")[0].sequences
        assert beam.tokens[len(prompt) :] == said
        moved = generate(llm, [*prompt, said[0]], "echo")
        assert moved.adapter_active and moved.outputs[0].token_ids != said[1:]


@pytest.mark.parametrize("speculation", ["off", 3])
def test_drafts_and_preemption_change_no_token(
    base: TinyBase, adapters: dict[str, Path], speculation: str | int
) -> None:
    """Four sequences of 4 to 5 pages in 9: they preempt each other while they answer."""
    repeated = text(40, 12)
    prompts = [repeated * 4 + text(start, start) + INVOCATION + repeated for start in (0, 30, 31, 32)]
    names = ["alora", "other", None, "lora"]
    params = replace(GREEDY, max_tokens=60)
    with LLM(base.path, adapters, **{**SMALL, "num_kv_pages": 9, "max_loras": 2}, speculation=speculation) as llm:
        outputs = llm.generate(prompts, params, names, use_tqdm=False)
        assert llm.engine.scheduler.stats().preemptions > 0
        assert speculation == "off" or sum(output.num_accepted_tokens for output in outputs) > 0
    for prompt, name, output in zip(prompts, names, outputs, strict=True):
        model: Any = base.adapted(adapters[name]) if name else base.model
        ids = torch.tensor([prompt])
        found = model.generate(input_ids=ids, max_new_tokens=60, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert output.outputs[0].token_ids == found[0, len(prompt) :].tolist()
