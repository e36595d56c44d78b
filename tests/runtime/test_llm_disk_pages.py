"""`LLM(kv_disk=...)`: prompts that have left host memory, or belong to an earlier engine, are not computed again."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from sidestream import LLM, RequestOutput, SamplingParams
from sidestream.compiler.options import OptionError
from sidestream.ops.core.kv_layout import PAGE_SIZE
from sidestream.runtime.worker.disk.page_folder import FOLDER
from support.tiny import AdapterSpec, TinyBase, tiny_adapters, tiny_llama

SMALL: dict[str, Any] = {
    "show_progress": False,
    "max_model_len": 320,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 128,
    "max_loras": 2,
    "max_lora_rank": 16,
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
    answers = [output.outputs[0] for output in outputs]
    rows = [
        [[(token, entry.logprob) for token, entry in row.items()] for row in each.logprobs or ()] for each in answers
    ]
    return [each.token_ids for each in answers], rows


def ask(llm: LLM, chosen: tuple[str | None, ...] = ADAPTERS) -> list[RequestOutput]:
    """Each prompt alone: together they have more pages than both memories."""
    pairs = zip(PROMPTS, chosen, strict=True)
    return [llm.generate([prompt], PARAMS, adapter, use_tqdm=False)[0] for prompt, adapter in pairs]


def write_all(llm: LLM) -> None:
    """Steps without new pages, until no page in host memory is to be written."""
    host = llm.engine.scheduler.states.host
    while host._saving or host._unwritten or host._num_writes:
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
    assert (folder / FOLDER).stat().st_mode & 0o777 == 0o700
    with LLM(base.path, adapters, kv_disk=folder, **SMALL) as llm:
        outputs = ask(llm)
        stats = llm.engine.scheduler.stats()
        assert found(outputs) == computed and stats.disk_pages_read == 18
        assert all(output.num_cached_tokens == 3 * PAGE_SIZE for output in outputs)
        others = ("second", "first", None, None, "second", "first")
        assert [output.num_cached_tokens for output in ask(llm, others)] == [0] * 6, "the adapter is part of the key"


def test_engines_share_a_directory_and_survive_its_loss(
    base: TinyBase, adapters: dict[str, Path], computed: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Damaged, deleted and unreachable files: everything is computed again, and counted."""
    folder = tmp_path / "pages"
    with LLM(base.path, adapters, kv_disk=folder, **SMALL) as one:
        ask(one)
        ask_others(one)
        with LLM(base.path, adapters, kv_disk=folder, **SMALL) as two:
            assert found(ask(two)) == computed and two.engine.scheduler.stats().disk_pages_read == 18
            files = list(folder.glob("*/*"))
            for path in files[::2]:
                os.truncate(path, 1000)
            for path in files[1::2]:
                path.unlink()
            assert found(ask(one)) == computed
            stats = one.engine.scheduler.stats()
            assert stats.disk_pages_damaged > 0 and stats.disk_pages_read == stats.disk_failures == 0
            shutil.rmtree(folder)
            ask_others(two)
            assert found(ask(two)) == computed
            stats = two.engine.scheduler.stats()
            assert stats.disk_failures > 1 and not folder.exists()
    assert sum("KV pages are not kept on disk" in record.message for record in caplog.records) == 1


def test_other_weights_and_options_have_other_files(base: TinyBase, tmp_path: Path) -> None:
    """Also of one model: what is rounded differently is another page."""
    folders = []
    for changes in ({}, {"precision": "bf16"}, {"max_lora_rank": 32}, {"max_num_seqs": 2}):
        with LLM(base.path, kv_disk=tmp_path / "pages", **(SMALL | changes)) as llm:
            folders.append(llm.model.limits.disk_prefix)
    copied = tmp_path / "other"
    shutil.copytree(base.path, copied)
    with LLM(copied, kv_disk=tmp_path / "pages", **SMALL) as llm:
        folders.append(llm.model.limits.disk_prefix)
    assert folders[0] == folders[3] and len(set(folders)) == 4


def test_options_that_contradict_are_refused(base: TinyBase, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"kv_disk='/x' is a tier below host memory; add kv_host_gb=16, or more"):
        LLM(base.path, kv_disk="/x")
    with pytest.raises(OptionError, match=r"kv_disk_gb=5 has no effect without a directory; add kv_disk='DIR'"):
        LLM(base.path, kv_host_gb=1, kv_disk_gb=5)
    with pytest.raises(OptionError, match=r"kv_disk=3 must be a directory"):
        LLM(base.path, kv_host_gb=1, kv_disk=3)
    with pytest.raises(OptionError, match=r"kv_disk_gb=1e-06 does not hold two KV pages of \d+ bytes; raise it"):
        LLM(base.path, kv_disk=tmp_path / "pages", kv_disk_gb=1e-6, **SMALL)
    (tmp_path / "open" / FOLDER).mkdir(mode=0o755, parents=True)
    with pytest.raises(OptionError, match=rf"other users may read or write .*; run `chmod 700 .*{FOLDER}`"):
        LLM(base.path, kv_disk=tmp_path / "open", **SMALL)
