"""With `exact=True` a token's bits follow from its adapter and the tokens before it: over batches, chunks, caches,
preemptions and restarts.
"""

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sidestream import LLM, SamplingParams
from sidestream.compiler.options import OptionError
from sidestream.runtime.api.errors import RequestError
from sidestream.tools.bench.random_model import TINY, write_model, write_random_adapter
from sidestream.tools.options.models import LLAMA_8B

# 4 query heads of 128 on 2 KV heads (Gluon kernels), and of 64 (Triton); an MLP of 8,192 columns has other launches
GPU_MODELS: dict[str, dict[str, Any]] = {
    "head_dim 128": LLAMA_8B
    | {
        "vocab_size": 1030,  # rows of logits that are not whole 16 bytes
        "hidden_size": 512,
        "intermediate_size": 8192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 128,
    },
    "head_dim 64": TINY | {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 256},
}
Answers = list[tuple[list[int], list[float]]]


def random_ids(source: random.Random, length: int, vocabulary: int = 512) -> list[int]:
    return [source.randrange(vocabulary) for _ in range(length)]


def answers(llm: LLM, prompts: Any, adapters: Any, length: int, first: int = 0) -> Answers:
    """Sampled tokens and their log-probabilities, of requests from number `first` on."""
    params = [
        SamplingParams(
            temperature=index % 3 / 2, top_p=0.9 if index % 2 else 1.0, seed=index, max_tokens=length + index % 5,
            ignore_eos=True, logprobs=2,
        )
        for index in range(first, first + len(prompts))
    ]  # fmt: skip
    outputs = [each.outputs[0] for each in llm.generate(prompts, params, adapters, use_tqdm=False)]
    return [
        (
            each.token_ids,
            [entry[token].logprob for token, entry in zip(each.token_ids, each.logprobs or (), strict=True)],
        )
        for each in outputs
    ]


def differences(got: Answers, expected: Answers) -> list[tuple[int, int]]:
    """(answer, first token) where tokens or the bits of log-probabilities differ."""
    found = []
    for index, (answer, want) in enumerate(zip(got, expected, strict=True)):
        pairs = zip(zip(*answer, strict=True), zip(*want, strict=True), strict=True)
        found += [(index, place) for place, (one, other) in enumerate(pairs) if one != other][:1]
    return found


def preempting(llm: LLM, every: int) -> Any:
    """Preempt a running sequence every few steps; returns the scheduler's states."""
    scheduler, step = llm.engine.scheduler, llm.engine.step
    source = random.Random(1)

    def step_and_preempt() -> Any:
        running = scheduler.states.running
        if running and source.randrange(every) == 0:
            chosen = source.choice(running)
            if chosen.preemptions < 3:
                scheduler.preemption.preempt(chosen)
        return step()

    llm.engine.step = step_and_preempt  # type: ignore[method-assign]
    return scheduler.states


def check_kinds(llm: LLM) -> list[bool]:
    """Check that no step mixes tokens of prompts and sampled ones; returns the list that gets each step's kind."""
    kinds: list[bool] = []
    submit, scheduler = llm.engine.runner.submit, llm.engine.scheduler

    def check(plan: Any) -> Any:
        _, sequences = scheduler._issued[plan.step]
        lengths = np.repeat([sequence.sampled[0][0] for sequence in sequences], np.diff(plan.query_start))
        assert ((plan.positions >= lengths) == plan.decode).all()
        kinds.append(plan.decode)
        return submit(plan)

    llm.engine.runner.submit = check  # type: ignore[method-assign]
    return kinds


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_model(tmp_path_factory.mktemp("adapters"), TINY, 2, 8)


OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "device": "cpu",
    "max_model_len": 192,
    "max_loras": 2,
    "show_progress": False,
    "exact": True,
}


def test_answers_are_the_same_in_every_engine(adapters: dict[str, Path]) -> None:
    source = random.Random(2)
    beginning = random_ids(source, 70)
    prompts = [(beginning if index % 2 else []) + random_ids(source, source.randrange(1, 60)) for index in range(6)]
    chosen = [[None, *adapters][index % 3] for index in range(6)]
    first = LLM(TINY, adapters, **OPTIONS)
    kinds = check_kinds(first)
    expected = answers(first, prompts, chosen, 12)
    assert answers(first, prompts, chosen, 12) == expected, "from the cache"
    assert set(kinds) == {False, True}
    for size, tokens, caching in ((1, 8, False), (4, 64, True)):
        llm = LLM(
            TINY, adapters, max_num_seqs=size, max_num_batched_tokens=tokens, enable_prefix_caching=caching, **OPTIONS
        )
        check_kinds(llm)
        states = preempting(llm, 8)
        assert answers(llm, prompts, chosen, 12) == expected
        assert states.preemptions > 3
    scores = first.score(prompts, [tokens for tokens, _ in expected], chosen)
    assert [score.logprobs.tolist() for score in scores] == [logprobs for _, logprobs in expected]


def test_what_is_not_exact_is_refused(adapters: dict[str, Path], tmp_path: Path) -> None:
    refusals: list[tuple[str, Any, str]] = [
        ("precision", "fp8", "precision='fp8' contradicts exact=True, which supports only precision='int8'"),
        ("precision", "bf16", "precision='bf16' contradicts exact=True"),
        ("kv_cache_dtype", "bf16", "kv_dtype='bf16' contradicts exact=True, which supports only kv_dtype='int8'"),
        ("lm_head", "bf16", "lm_head='bf16' contradicts exact=True"),
        ("lora_dtype", "bf16", "lora_dtype='bf16' contradicts exact=True"),
        ("whole_layer", "on", "whole_layer='on' contradicts exact=True"),
        ("logprobs_mode", "processed_logprobs", "logprobs_mode='processed_logprobs' contradicts exact=True"),
        ("tensor_parallel_size", 2, "tensor_parallel_size=2 contradicts exact=True"),
        ("speculation", "auto", "speculation='auto' contradicts exact=True"),
        ("lora_parts", ["dora"], "exact=True supports only adapters with LoRA on projections, not with dora"),
        ("lora_target_modules", ["q_proj", "lm_head"], "not with lm_head; leave out these adapters, or exact"),
        ("disable_passes", ("quantize_linears",), "is computed by aten"),
    ]
    for name, value, message in refusals:
        with pytest.raises(OptionError, match=re.escape(message)):
            LLM(TINY, **OPTIONS | {name: value, "max_lora_rank": 8})
    sparse = TINY | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8,
                     "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}  # fmt: skip
    with pytest.raises(OptionError, match="does not support mixtures of experts, and the model has 8 experts"):
        LLM(sparse, **OPTIONS)


def test_a_switch_of_running_requests_is_refused(adapters: dict[str, Path]) -> None:
    import json

    from safetensors.torch import load_file

    llm = LLM(TINY, max_lora_rank=8, **OPTIONS)
    directory = Path(next(iter(adapters.values())))
    tensors = load_file(directory / "adapter_model.safetensors")
    config = json.loads((directory / "adapter_config.json").read_text())
    with pytest.raises(RequestError, match=r"contradicts exact=True.*give inflight='pin'"):
        llm.update_adapter("policy", tensors, config, inflight="switch")
    assert llm.update_adapter("policy", tensors, config).version == 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_MODELS)
def test_answers_are_the_same_in_every_engine_on_the_gpu(name: str, tmp_path: Path) -> None:
    """Alone, among 8 and among 64; in one chunk and in many; cached, preempted, started again; and scored."""
    model = GPU_MODELS[name]
    adapters = {f"rank{rank}": write_random_adapter(tmp_path / str(rank), model, rank, rank) for rank in (8, 16)}
    source = random.Random(5)
    vocabulary = model["vocab_size"]
    beginning = random_ids(source, 600, vocabulary)
    prompts = [beginning[: source.choice((0, 64, 100, 600))] + random_ids(source, source.randrange(1, 130), vocabulary)
               for _ in range(64)]  # fmt: skip
    prompts[3] = random_ids(source, 1900, vocabulary)
    prompts[5] = random_ids(source, 700, vocabulary)
    chosen = [[None, *adapters][index % 3] for index in range(64)]
    options: dict[str, Any] = OPTIONS | {
        "device": "cuda", "max_model_len": 2048, "gpu_memory_utilization": 0.1, "max_lora_rank": 16,
        "fail_on_compilation": True,
    }  # fmt: skip
    with LLM(model, adapters, max_num_seqs=64, **options) as llm:
        kinds = check_kinds(llm)
        expected = answers(llm, prompts, chosen, 24)
        assert not differences(answers(llm, prompts, chosen, 24), expected), "from the cache"
        assert set(kinds) == {False, True}
        for index in range(0, 64, 7):
            (alone,) = answers(llm, prompts[index : index + 1], chosen[index], 24, index)
            assert not differences([alone], [expected[index]]), f"{index} alone"
        scores = llm.score(prompts, [tokens for tokens, _ in expected], chosen)
        scored = [(tokens, score.logprobs.tolist()) for (tokens, _), score in zip(expected, scores, strict=True)]
        assert not differences(scored, expected), "scored"
    for size, tokens, caching in ((8, 8192, True), (200, 333, False)):
        with LLM(
            model, adapters, max_num_seqs=size, max_num_batched_tokens=max(size, tokens), enable_prefix_caching=caching,
            **options,
        ) as llm:  # fmt: skip
            states = preempting(llm, 6)
            different = differences(answers(llm, prompts, chosen, 24), expected)
            assert not different, f"{size} sequences, steps of {tokens} tokens"
            assert states.preemptions > 3
