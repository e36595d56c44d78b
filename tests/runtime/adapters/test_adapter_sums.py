"""Weighted sums of adapters in an `LLM`: equal to PEFT's, shared by content, and refused where they are not defined."""

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from sidestream.graphs.adapter import load_adapter
from sidestream.graphs.adapter_config import AdapterError
from sidestream.graphs.config import LlamaConfig
from sidestream.runtime.adapters.adapter_sums import FIRST_SUM_NUMBER, AdapterNumbers, SumPart
from sidestream.runtime.adapters.registry import AdapterRegistry
from sidestream.runtime.adapters.weighted_sum import sum_obstacle, weighted_sum
from sidestream.runtime.api.adapter_sum import is_sum, sum_content, sum_name, sum_parts
from sidestream.runtime.api.errors import RequestError
from sidestream.runtime.api.sampling_params import SamplingParams
from sidestream.runtime.llm import LLM
from support.tiny import AdapterSpec, TinyBase, tiny_adapters, tiny_llama

SPECS = {
    "a": AdapterSpec(rank=4, alpha=12),
    "b": AdapterSpec(rank=8, alpha=8, targets=("q_proj", "down_proj")),
    "c": AdapterSpec(rank=5, alpha=20, targets=("k_proj", "v_proj", "o_proj", "up_proj")),
}
PROMPT = [5, 9, 2, 7, 11, 3, 8]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)
SMALL: dict[str, Any] = {
    "device": "cpu",
    "precision": "fp32",
    "show_progress": False,
    "max_model_len": 128,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 64,
    "max_loras": 3,
    "max_lora_rank": 32,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TinyBase:
    return tiny_llama(tmp_path_factory.mktemp("sums"))


@pytest.fixture(scope="module")
def paths(base: TinyBase) -> dict[str, Path]:
    return dict(zip(SPECS, tiny_adapters(base, list(SPECS.values())), strict=True))


@pytest.fixture(scope="module")
def llm(base: TinyBase, paths: dict[str, Path]) -> Iterator[LLM]:
    with LLM(base.path, paths, **SMALL) as llm:
        yield llm


def answers(llm: LLM, *adapters: Any) -> list[tuple[list[int], list[float]]]:
    """Return the tokens and their log-probabilities of one batch with these adapters."""
    outputs = llm.generate([PROMPT] * len(adapters), GREEDY, list(adapters), use_tqdm=False)
    found = []
    for output in outputs:
        completion = output.outputs[0]
        logprobs = [step[token].logprob for step, token in zip(completion.logprobs, completion.token_ids, strict=True)]
        found.append((completion.token_ids, logprobs))
    return found


def peft_answer(base: TinyBase, paths: dict[str, Path], weights: dict[str, float]) -> tuple[list[int], list[float]]:
    """Return the greedy answer of PEFT's sum, and its log-probabilities."""
    first, *others = weights
    model = PeftModel.from_pretrained(copy.deepcopy(base.model), paths[first], adapter_name=first)
    for name in others:
        model.load_adapter(paths[name], adapter_name=name)
    model.add_weighted_adapter(list(weights), list(weights.values()), "sum", combination_type="cat")
    model.set_adapter("sum")
    model.eval()
    ids, logprobs = list(PROMPT), []
    with torch.no_grad():
        for _ in range(GREEDY.max_tokens):
            scores = model(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)
            ids.append(int(scores.argmax()))
            logprobs.append(float(scores.max()))
    return ids[len(PROMPT) :], logprobs


@pytest.mark.parametrize(
    "weights",
    [{"a": 0.7, "b": 0.3}, {"a": 1.5, "b": -0.5, "c": 0.25}, {"c": 2.0}],
    ids=["two", "three", "one"],
)
def test_a_sum_answers_as_pefts_next_to_its_parts(
    llm: LLM, base: TinyBase, paths: dict[str, Path], weights: dict[str, float]
) -> None:
    alone = answers(llm, *weights, None)
    *parts, without, summed = answers(llm, *weights, None, weights)
    tokens, logprobs = peft_answer(base, paths, weights)
    assert summed[0] == tokens and summed[1] == pytest.approx(logprobs, abs=1e-4)
    for (ids, scores), (alone_ids, alone_scores) in zip([*parts, without], alone, strict=True):
        assert ids == alone_ids and scores == pytest.approx(alone_scores, abs=1e-5)
    assert all(summed[1] != pytest.approx(scores, abs=1e-3) for _, scores in alone)


def test_a_sum_of_one_adapter_with_weight_1_is_that_adapter(llm: LLM) -> None:
    alone, weighted, with_zero = answers(llm, "b", {"b": 1}, {"a": 0.0, "b": 1.0})
    assert alone == weighted == with_zero


def test_equal_sums_share_prefix_pages_whatever_their_order(base: TinyBase, paths: dict[str, Path]) -> None:
    prompt = [1 + index % 40 for index in range(100)]
    copies = {**paths, "a2": paths["a"]}
    with LLM(base.path, copies, **SMALL) as llm:
        for adapter, cached in (
            ({"a": 0.5, "b": 0.25}, 0),
            ({"b": 0.25, "a": 0.5}, 64),
            ({"b": 0.25, "c": 0.0, "a2": 0.5}, 64),  # a copy of a
            ({"a": 0.5, "b": 0.5}, 0),
            ("a", 0),
        ):
            (output,) = llm.generate(prompt, GREEDY, adapter, use_tqdm=False)
            assert output.num_cached_tokens == cached, adapter


def test_a_replaced_part_changes_the_next_sum_and_a_removed_one_ends_it(
    base: TinyBase, paths: dict[str, Path], tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(paths["a"], tmp_path / "x"))
    with LLM(base.path, {"x": directory, "b": paths["b"]}, **SMALL | {"lora_target_modules": "all"}) as llm:
        weights = {"x": 0.6, "b": 0.4}
        assert answers(llm, weights)[0][0] == peft_answer(base, paths | {"x": directory}, weights)[0]
        llm.add_adapter("x", paths["c"], replace=True)
        tokens, logprobs = peft_answer(base, paths | {"x": paths["c"]}, weights)
        ((found, scores),) = answers(llm, weights)
        assert found == tokens and scores == pytest.approx(logprobs, abs=1e-4)
        llm.remove_adapter("x")
        with pytest.raises(RequestError, match="adapter 'x' is not known"):
            answers(llm, weights)


def test_more_sums_than_are_kept_are_made_again(base: TinyBase, paths: dict[str, Path]) -> None:
    options = SMALL | {"max_adapter_sums": 2, "max_cpu_loras": 2, "max_loras": 1}
    with LLM(base.path, paths, **options) as llm:
        weights = [{"a": 1.0, "b": 0.25 * factor} for factor in range(1, 6)]
        first = [answers(llm, each)[0] for each in weights]
        assert len(set(map(str, first))) == 5
        assert [answers(llm, each)[0] for each in weights] == first
        kept = [number for number in llm.registry.hashes if number not in llm.registry.numbers.values()]
        assert len(kept) <= 3


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        ({}, "adapter has no weight other than 0"),
        ({"a": 0}, "adapter has no weight other than 0"),
        ({"a": float("nan"), "b": 1}, "the weight of 'a' is nan; it must be a number from -100 to 100"),
        ({"a": float("inf")}, "the weight of 'a' is inf"),
        ({"a": 101, "b": 1}, "the weight of 'a' is 101"),
        ({"a": True, "b": 1}, "the weight of 'a' is True"),
        ({"a": "1", "b": 1}, "the weight of 'a' is 1"),
        ({"a": 0.5, 7: 0.5}, "'7' is not the name of an adapter"),
        ({"a": 0.5, "x*1": 0.5}, r"'x\*1' is not the name"),
        ({f"a{index}": 0.5 for index in range(9)}, "9 adapters; a sum has at most 8"),
        ({"a": 0.5, "z": 0.5}, "adapter 'z' is not known"),
        ("a*0.5+z*0.5", "adapter 'z' is not known"),
        ("a*0.5", None),
        ("a*1e3", "is not known"),
        ([{"a": 0.5}, None], "entries for 1 prompts"),
    ],
    ids=str,
)
def test_bad_sums_are_refused(llm: LLM, adapter: Any, message: str | None) -> None:
    if message is None:
        assert answers(llm, adapter) == answers(llm, {"a": 0.5})
        return
    with pytest.raises(RequestError, match=message):
        llm.generate([PROMPT], GREEDY, adapter, use_tqdm=False)
    with pytest.raises(RequestError, match=message):
        list(llm.stream([PROMPT], GREEDY, adapter))


def test_a_rank_above_the_slots_names_the_rank_to_start_with(base: TinyBase, paths: dict[str, Path]) -> None:
    with LLM(base.path, paths, **SMALL | {"max_lora_rank": 16}) as llm:
        weights = {"a": 0.5, "b": 0.5, "c": 0.5}
        with pytest.raises(RequestError, match=r"rank 17 \(4 of 'a' \+ 8 of 'b' \+ 5 of 'c'\).*max_lora_rank=17"):
            answers(llm, weights)
        assert len(answers(llm, {"a": 0.5, "b": 0.5})[0][0]) == GREEDY.max_tokens


def test_files_of_a_part_that_change_are_named(base: TinyBase, paths: dict[str, Path], tmp_path: Path) -> None:
    directory = Path(shutil.copytree(paths["a"], tmp_path / "changing"))
    registry = AdapterRegistry(LlamaConfig.from_directory(base.path), 32)
    numbers = [registry.add("x", directory).number, registry.add("b", paths["b"]).number]
    registry.add_sum(FIRST_SUM_NUMBER, [(numbers[0], 0.5), (numbers[1], -0.5)])
    assert registry.read(FIRST_SUM_NUMBER).rank == 12 and registry.is_unchanged(FIRST_SUM_NUMBER)
    config = json.loads((directory / "adapter_config.json").read_text())
    (directory / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 99}))
    assert not registry.is_unchanged(FIRST_SUM_NUMBER)
    with pytest.raises(AdapterError, match="'x': its files have changed"):
        registry.read(FIRST_SUM_NUMBER)
    registry.drop(FIRST_SUM_NUMBER)
    assert FIRST_SUM_NUMBER not in registry.hashes and set(registry.hashes) == set(numbers)


def test_names_are_canonical() -> None:
    name = sum_name([("b", 0.3), ("z", 0), ("a", -1e-05)], "adapter")
    assert name == "a*-1e-05+b*0.3" and is_sum(name) and sum_parts(name) == (("a", -1e-05), ("b", 0.3))
    assert sum_name([("a", 1)], "adapter") == "a" and sum_parts("a") == (("a", 1.0),) and not is_sum("a")
    for other in ("b*0.3+a*0.5", "a*0.50", "a*1.0", "a*nan", "a*", "*", "a*0.5+", "a*101.0", "a*0.5+a*0.5"):
        assert not is_sum(other), other
    with pytest.raises(RequestError, match="adapter 'a' twice"):
        sum_name([("a", 0.5), ("a", 0.5)], "adapters")


def test_a_content_depends_on_parts_and_weights_only() -> None:
    assert sum_content([("aa", 0.5), ("bb", 0.3)]) == sum_content([("bb", 0.3), ("aa", 0.5)])
    assert sum_content([("aa", 0.5), ("bb", 0.3)]) != sum_content([("aa", 0.3), ("bb", 0.5)])
    assert sum_content([("aa", 1.0)]) == "aa" != sum_content([("aa", 0.5)])


def test_parts_that_are_more_than_lora_are_refused() -> None:
    adapters = {"a": SumPart(0, 4, "aa"), "d": SumPart(1, 4, "dd", "it has dora besides plain LoRA")}
    numbers = AdapterNumbers({"a": 0, "d": 1}, adapters.__getitem__, lambda *_: None, lambda _: None, 16)
    with pytest.raises(RequestError, match="adapter 'd' cannot be part of a sum: it has dora"):
        numbers.get("a*0.5+d*0.5")
    assert numbers.get("d") == 1


@pytest.mark.parametrize(
    ("spec", "obstacle"),
    [
        (AdapterSpec(), ""),
        (AdapterSpec(extra={"use_dora": True}), "it has dora besides plain LoRA"),
        (AdapterSpec(targets=("q_proj", "lm_head")), "it has lm_head besides plain LoRA"),
        (AdapterSpec(extra={"alora_invocation_tokens": [5]}), "it has an invocation (aLoRA) besides plain LoRA"),
    ],
)
def test_pefts_adapters_that_can_be_parts(base: TinyBase, spec: AdapterSpec, obstacle: str) -> None:
    (path,) = tiny_adapters(base, [spec])
    assert sum_obstacle(load_adapter(path, LlamaConfig.from_directory(base.path), 64, base=base.path)) == obstacle


def test_the_least_recently_used_sum_is_forgotten() -> None:
    made: list[int] = []
    forgotten: list[int] = []
    part = SumPart(0, 4, "aa")
    numbers = AdapterNumbers(
        {"a": 0}, lambda _: part, lambda number, parts, content: made.append(number), forgotten.append, 16, maximum=2
    )
    first, second = numbers["a*0.1"], numbers["a*0.2"]
    assert numbers["a*0.1"] == first
    third = numbers["a*0.3"]
    assert made == [first, second, third] and forgotten == [second]
    assert numbers.sums_with(0) == [first, third]


def test_a_sums_tensors_have_all_ranks_one_below_the_other(base: TinyBase, paths: dict[str, Path]) -> None:
    config = LlamaConfig.from_directory(base.path)
    a, b = (load_adapter(paths[name], config, 64) for name in "ab")
    total = weighted_sum([(a, 0.5), (b, -2.0)], "hash")
    assert total.rank == 12 and set(total.targets) == {*a.targets, *b.targets}
    for module, (rows, columns) in total.tensors.items():
        wanted = sum(
            weight * each.scaling[module] * each.tensors[module][1].float() @ each.tensors[module][0].float()
            for each, weight in ((a, 0.5), (b, -2.0))
            if module in each.tensors
        )
        assert torch.allclose(total.scaling[module] * columns @ rows, wanted, atol=1e-5)
