"""`LLM(kv_host_gb=...)`: prompts that have left the device are not computed again, and no answer changes."""

import random
from pathlib import Path
from typing import Any

import pytest
from sidestream import LLM, CapacityError, RequestOutput, SamplingParams
from sidestream.compiler.options import OptionError
from sidestream.ops.core.kv_layout import PAGE_SIZE
from support.tiny import AdapterSpec, TinyBase, tiny_adapters, tiny_llama

SMALL: dict[str, Any] = {
    "show_progress": False,
    "max_model_len": 448,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 128,
    "max_loras": 2,
    "num_kv_pages": 12,
}
HOST_GB = 0.05
PARAMS = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=2)
ROUNDS = 2


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TinyBase:
    return tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapters(base: TinyBase) -> dict[str, Path]:
    return dict(zip(("first", "second"), tiny_adapters(base, [AdapterSpec(rank=4), AdapterSpec(rank=8)]), strict=True))


def prompts(count: int, length: int = 250, seed: int = 0) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(200) for _ in range(length)] for _ in range(count)]


def found(output: RequestOutput) -> Any:
    """Tokens and log-probabilities, to the bit."""
    completion = output.outputs[0]
    logprobs = [sorted((token, each.logprob) for token, each in entry.items()) for entry in completion.logprobs or ()]
    return completion.token_ids, logprobs


def ask(llm: LLM, params: SamplingParams = PARAMS) -> list[list[RequestOutput]]:
    """The same prompts again and again, under the base and two adapters; more than the device holds, also at once."""
    chosen = [name for name in (None, "first", "second") for _ in range(3)]
    return [llm.generate(prompts(3) * 3, params, chosen, use_tqdm=False) for _ in range(ROUNDS)]


@pytest.mark.parametrize(
    ("device", "options"),
    [
        ("cpu", {"precision": "fp32"}),
        ("cpu", {"precision": "int8", "speculation": 3}),
        pytest.param("cuda", {"precision": "int8"}, marks=pytest.mark.gpu),
        pytest.param("cuda", {"precision": "bf16", "enforce_eager": True}, marks=pytest.mark.gpu),
    ],
)
def test_answers_equal_those_without_host_memory(
    base: TinyBase, adapters: dict[str, Path], device: str, options: dict[str, Any], pytestconfig: pytest.Config
) -> None:
    """With `--exhaustive` also in eight bits and with drafts"""
    if device == "cpu" and "speculation" in options and not pytestconfig.getoption("--exhaustive"):
        pytest.skip("runs with --exhaustive")
    answers = []
    for gigabytes in (0, HOST_GB):
        with LLM(base.path, adapters, device=device, kv_host_gb=gigabytes, **options, **SMALL) as llm:
            outputs = ask(llm)
            stats = llm.engine.scheduler.stats()
            answers.append([[found(output) for output in each] for each in outputs])
            cached = [output.num_cached_tokens for output in outputs[-1]]
            assert stats.preemptions > 0, "preempted sequences return to pages from host memory too"
    if device == "cpu":
        assert answers[0] == answers[1]
        assert sum(count == 3 * PAGE_SIZE for count in cached) >= 7 and stats.prefix_host_hits >= 21 * PAGE_SIZE
    else:  # there the bits of an answer depend on the batch, and its later tokens on the bits of the first
        for without, with_pages in zip(*answers, strict=True):
            for (tokens, logprobs), (other_tokens, other) in zip(without, with_pages, strict=True):
                assert dict(other[0]).get(tokens[0], -1e9) > dict(logprobs[0])[tokens[0]] - 0.2, (tokens, other_tokens)
        assert stats.prefix_host_hits > 0
    assert stats.host_pages_saved >= 27 and stats.host_pages_used <= stats.host_pages and stats.pages_used == 0


def test_pages_survive_a_sleep_that_keeps_the_weights(base: TinyBase, adapters: dict[str, Path]) -> None:
    options = {"device": "cpu", "precision": "fp32", "enable_sleep_mode": True}
    with LLM(base.path, adapters, kv_host_gb=HOST_GB, **options, **SMALL) as llm:
        before = ask(llm)[-1]
        hits = []
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            counted = llm.engine.scheduler.stats().prefix_host_hits
            (again,) = llm.generate(prompts(3)[:1], PARAMS, "second", use_tqdm=False)
            assert found(again) == found(before[6])
            hits.append(llm.engine.scheduler.stats().prefix_host_hits - counted)
        assert hits == [3 * PAGE_SIZE, 0], "level 2 may read other weights"
        assert llm.reset_prefix_cache() and llm.engine.scheduler.stats().host_pages_used == 0


def test_sizes_that_cannot_be_are_refused(base: TinyBase) -> None:
    with pytest.raises(OptionError, match=r"kv_host_gb=-1 must be a number from 0 to 65536"):
        LLM(base.path, kv_host_gb=-1)
    with pytest.raises(OptionError, match=r"kv_host_gb=1 contradicts enable_prefix_caching=False; leave one out"):
        LLM(base.path, kv_host_gb=1, enable_prefix_caching=False)
    with pytest.raises(OptionError, match=r"kv_host_gb=1e-06 does not hold one KV page of \d+ bytes; raise it"):
        LLM(base.path, kv_host_gb=1e-6, device="cpu", precision="fp32", show_progress=False)
    with pytest.raises(CapacityError, match=r"kv_host_gb=60000 needs 60000.00 GiB of host memory, and .* are free"):
        LLM(base.path, kv_host_gb=60000, device="cpu", precision="fp32", show_progress=False)
