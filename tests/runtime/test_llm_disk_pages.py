"""`LLM(kv_disk=...)`: prompts that have left host memory, or belong to an earlier engine, are not computed again."""

from pathlib import Path
from typing import Any

import pytest
from sidestream import LLM, RequestOutput, SamplingParams
from sidestream.compiler.options import OptionError
from sidestream.ops.core.kv_layout import PAGE_SIZE
from support.tiny import AdapterSpec, TinyBase, tiny_adapters, tiny_llama

SMALL: dict[str, Any] = {
    "show_progress": False,
    "max_model_len": 320,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 128,
    "max_loras": 2,
    "num_kv_pages": 9,
    "device": "cpu",
    "precision": "fp32",
    "kv_host_gb": 0.003,  # 24 pages
}
PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=2)
PROMPTS = [[(seed * 31 + place * 7 + place // 9) % 250 for place in range(200)] for seed in range(6)]
ADAPTERS = ("first", None, "second", "first", None, "second")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TinyBase:
    return tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapters(base: TinyBase) -> dict[str, Path]:
    return dict(zip(("first", "second"), tiny_adapters(base, [AdapterSpec(rank=4), AdapterSpec(rank=8)]), strict=True))


def found(outputs: list[RequestOutput]) -> Any:
    """Tokens and log-probabilities, to the bit."""
    completions = [output.outputs[0] for output in outputs]
    return [
        (each.token_ids, [sorted((token, entry.logprob) for token, entry in row.items()) for row in each.logprobs or ()])
        for each in completions
    ]


def ask(llm: LLM, chosen: tuple[str | None, ...] = ADAPTERS) -> list[RequestOutput]:
    """Each prompt alone: together they have more pages than both memories."""
    return [llm.generate([prompt], PARAMS, name, use_tqdm=False)[0] for prompt, name in zip(PROMPTS, chosen, strict=True)]


def write_all(llm: LLM) -> None:
    """Steps without new pages, until all pages in host memory have files."""
    while (stats := llm.engine.scheduler.stats()).disk_pages_written < stats.host_pages_saved:
        llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)


def ask_others(llm: LLM, count: int = 14) -> None:
    """Other prompts of two pages each, until earlier ones have left both memories."""
    for seed in range(count):
        llm.generate([[seed, *range(140)]], PARAMS, use_tqdm=False)
        write_all(llm)


@pytest.fixture(scope="module")
def computed(base: TinyBase, adapters: dict[str, Path]) -> Any:
    with LLM(base.path, adapters, **(SMALL | {"kv_host_gb": 0})) as llm:
        return found(ask(llm))


def test_answers_are_those_that_are_computed_also_after_a_restart(
    base: TinyBase, adapters: dict[str, Path], computed: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "pages"
    with LLM(base.path, adapters, kv_disk=folder, **SMALL) as llm:
        assert found(ask(llm)) == computed
        write_all(llm)
        ask_others(llm)
        before = llm.engine.scheduler.stats()
        again = ask(llm)
        stats = llm.engine.scheduler.stats()
        assert found(again) == computed and stats.disk_pages_read - before.disk_pages_read == 18
        assert all(output.num_cached_tokens == 3 * PAGE_SIZE for output in again)
        assert stats.disk_pages_dropped == 0 and stats.disk_pages_damaged == stats.disk_failures == 0
    assert folder.stat().st_mode & 0o777 == 0o700
    with LLM(base.path, adapters, kv_disk=folder, **SMALL) as llm:
        outputs = ask(llm)
        stats = llm.engine.scheduler.stats()
        assert found(outputs) == computed and stats.disk_pages_read == 18
        assert all(output.num_cached_tokens == 3 * PAGE_SIZE for output in outputs)
        others = ("second", "first", None, None, "second", "first")
        assert [output.num_cached_tokens for output in ask(llm, others)] == [0] * 6, "the adapter is part of the key"


