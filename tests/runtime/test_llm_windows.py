"""LLM over a model with a sliding window: contexts beyond it, prefix caching, speculation, and contexts within it."""

from pathlib import Path

import pytest
import torch
from sidestream.compiler.cost.bytes_and_flops import windows_of
from sidestream.runtime.api.sampling_params import SamplingParams
from sidestream.runtime.llm import LLM
from support.tiny import AdapterSpec, TinyBase, oracle_greedy, tiny_adapters, tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TinyBase:
    directory = tmp_path_factory.mktemp("model")
    return tiny_model(directory, "Mistral", tokenizer=True, sliding_window=40, num_hidden_layers=1)


@pytest.fixture(scope="module")
def adapter(base: TinyBase) -> Path:
    return tiny_adapters(base, [AdapterSpec(rank=8)])[0]


def served(base: TinyBase, adapter: Path, max_model_len: int, **options: int) -> LLM:
    sizes = {"max_model_len": max_model_len, "max_num_seqs": 4, "max_num_batched_tokens": 48}
    return LLM(base.path, {"one": adapter}, precision="fp32", device="cpu", show_progress=False, **sizes, **options)


@pytest.mark.parametrize("speculation", [None, 3])
def test_greedy_tokens_beyond_the_window_are_those_of_transformers(
    base: TinyBase, adapter: Path, speculation: int | None
) -> None:
    llm = served(base, adapter, 256, **({} if speculation is None else {"speculation": speculation}))
    dice = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, 256, (length,), generator=dice).tolist() for length in (5, 39, 150, 70)]
    prompts.append([*prompts[2][:130], 7, 8, 9])  # its first pages are another's
    prompts.append([1, 2, 3, 4] * 20)
    chosen = [None, "one", "one", None, "one", None]
    outputs = llm.generate(prompts, GREEDY, adapter=chosen, use_tqdm=False)
    again = llm.generate(prompts, GREEDY, adapter=chosen, use_tqdm=False)  # from the prefix cache
    for ids, name, *found in zip(prompts, chosen, outputs, again, strict=True):
        want = oracle_greedy(base, adapter if name else None, ids, 8)
        assert [each.outputs[0].token_ids for each in found] == [want, want]


def test_contexts_within_the_window_are_computed_without_one(base: TinyBase, adapter: Path) -> None:
    for max_model_len, windows in ((40, {}), (41, {40: 1})):
        llm = served(base, adapter, max_model_len)
        (output,) = llm.generate([[5, 6, 7] * 10], GREEDY, use_tqdm=False)
        programs = llm.compiled.programs.values()
        assert [windows_of(program) for program in programs] == [windows] * len(programs) and programs
        assert output.outputs[0].token_ids == oracle_greedy(base, None, [5, 6, 7] * 10, 8)
