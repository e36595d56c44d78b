"""IA3 in an engine: batches with others, slots and caches, updates, limits, adapters that are refused while the engine
lives on.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from sidestream.graphs.adapter import load_adapter
from sidestream.graphs.adapter_config import CONFIG, AdapterError
from sidestream.graphs.adapter_description import describe_adapter
from sidestream.graphs.config import LlamaConfig
from sidestream.graphs.lora import LoraShape
from sidestream.graphs.lora_stacks import check_fits
from sidestream.runtime.api.errors import RequestError
from sidestream.runtime.api.sampling_params import SamplingParams
from sidestream.runtime.llm import LLM
from support.ia3 import EVERYWHERE, OUTPUTS, PAPER, ia3_adapters
from support.tiny import AdapterSpec, TinyBase, oracle_greedy, tiny_adapters, tiny_llama, tiny_model

WEIGHTS = "adapter_model.safetensors"
SMALL: dict[str, Any] = {
    "device": "cpu",
    "show_progress": False,
    "max_model_len": 128,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 64,
    "precision": "fp32",
}
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
PROMPT = [3, 77, 210, 5, 148, 12, 301]
KINDS = {"paper": PAPER, "everywhere": EVERYWHERE, "head": {**OUTPUTS, "modules_to_save": ["lm_head"]}}
Tensors = dict[str, torch.Tensor]
Fields = dict[str, Any]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TinyBase:
    return tiny_llama(tmp_path_factory.mktemp("model"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def paths(base: TinyBase) -> dict[str, Path]:
    found = dict(zip(KINDS, ia3_adapters(base, list(KINDS.values())), strict=True))
    others = [AdapterSpec(rank=8), AdapterSpec(rank=4, extra={"use_dora": True})]
    return found | dict(zip(("lora", "dora"), tiny_adapters(base, others), strict=True))


def answers(llm: LLM, *adapters: str | None) -> list[list[int]]:
    outputs = llm.generate([PROMPT] * len(adapters), GREEDY, adapter=list(adapters), use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def stored(path: Path) -> tuple[Tensors, Fields]:
    return load_file(path / WEIGHTS), json.loads((path / CONFIG).read_text())


def test_alone_together_and_after_a_restart(
    base: TinyBase, paths: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One slot of each kind after another, with the disk cache's hashes and slots the second time."""
    monkeypatch.setenv("SIDESTREAM_CACHE", str(tmp_path / "cache"))
    names = [*paths, None]
    want = [oracle_greedy(base, None if name is None else paths[name], PROMPT, 5) for name in names]
    assert len({tuple(each) for each in want}) > 4
    for again in (False, True):
        with LLM(base.path, paths, max_loras=1, max_cpu_loras=1, **SMALL) as llm:
            assert [answers(llm, name)[0] for name in names] == want
            cache = llm.model.runner.slot_loader.store.disk_cache
            cache.jobs.flush(60)
            assert len(list((tmp_path / "cache" / "adapters").glob("*.hash"))) == len(paths)
            assert llm.model.registry.is_unchanged(llm.model.registry.numbers["paper"]), again
    with LLM(base.path, paths, **SMALL) as llm:
        assert answers(llm, *names) == want


def test_the_prefix_cache_tells_adapters_apart(base: TinyBase, paths: dict[str, Path], tmp_path: Path) -> None:
    """The same bytes under other names, or as factors of another module."""
    tensors, _ = stored(paths["paper"])
    copied, moved = tmp_path / "copied", tmp_path / "moved"
    for target in (copied, moved):
        shutil.copytree(paths["paper"], target)
    swapped = {
        name.replace("k_proj", "#").replace("v_proj", "k_proj").replace("#", "v_proj"): value.clone()
        for name, value in tensors.items()
    }
    save_file(swapped, moved / WEIGHTS)
    with LLM(base.path, {"paper": paths["paper"], "copied": copied, "moved": moved}, **SMALL) as llm:
        first, same, other = (
            llm.model.registry.hashes[llm.model.registry.numbers[name]] for name in ("paper", "copied", "moved")
        )
        assert first == same != other
        prompt = [PROMPT * 12] * 2
        for names in (["paper", "moved"], ["moved", "copied"]):
            found = [each.outputs[0].token_ids for each in llm.generate(prompt, GREEDY, adapter=names, use_tqdm=False)]
            places = {"paper": paths["paper"], "copied": copied, "moved": moved}
            assert found == [oracle_greedy(base, places[name], prompt[0], 5) for name in names]


def test_an_engine_without_its_parts(tmp_path: Path, base: TinyBase, paths: dict[str, Path]) -> None:
    with LLM(base.path, {"lora": paths["lora"]}, max_loras=3, **SMALL) as llm:
        with pytest.raises(RequestError, match=r"IA3's factors.* --lora-parts ia3 .*lora_parts=\['ia3'\]"):
            llm.add_adapter("paper", paths["paper"])
        assert answers(llm, "lora") == [oracle_greedy(base, paths["lora"], PROMPT, 5)]
    with LLM(base.path, max_loras=3, max_lora_rank=8, lora_parts=["ia3"], **SMALL) as llm:
        for name in ("paper", "dora"):  # gains of both are in one stack
            llm.add_adapter(name, paths[name])
            assert answers(llm, name) == [oracle_greedy(base, paths[name], PROMPT, 5)]
    paper = load_adapter(paths["paper"], LlamaConfig.from_directory(base.path), 16)
    check_fits(paper, LoraShape(1, 16, parts=("dora",)))
    with pytest.raises(ValueError, match=r"on k_proj, v_proj, up_proj does not fit .*lora_target_modules"):
        check_fits(paper, LoraShape(1, 16, ("q_proj",), ("ia3",)))


def test_descriptions_from_a_damaged_process(base: TinyBase, paths: dict[str, Path]) -> None:
    config = LlamaConfig.from_directory(base.path)
    found = describe_adapter(paths["paper"], config, 16)
    found.check(config, 16)
    home = "model.layers.0."
    for module, kind in (("mlp.down_proj", "ia3_inputs"), ("self_attn.q_proj", "ia3"), ("mlp.up_proj", "magnitude")):
        parts = {name: tensors for name, tensors in found.parts.items() if not name.endswith("up_proj")}
        with pytest.raises(ValueError, match=r"expected|do not match"):
            replace(found, parts=parts | {f"{home}{module}": {kind: DOWN}}).check(config, 16)
    for parts in ({}, {f"{home}mlp.up_proj": {"gain": DOWN}}, {f"{home}mlp.up_proj": {"bias": DOWN}}):
        with pytest.raises(ValueError, match="a kind of tensor that does not exist"):
            replace(found, parts=parts).check(config, 16)


def test_shapes_decide_where_the_config_does_not(base: TinyBase, paths: dict[str, Path], tmp_path: Path) -> None:
    """null stands for PEFT's defaults of the model, and RE2 has no look-around."""
    config = LlamaConfig.from_directory(base.path)
    want = load_adapter(paths["paper"], config, 16).content_hash
    for number, fields in enumerate(
        ({"feedforward_modules": "(?!x).*down_proj"}, {"target_modules": None, "feedforward_modules": None})
    ):
        changed = Path(shutil.copytree(paths["paper"], tmp_path / str(number)))
        (changed / CONFIG).write_text(json.dumps(stored(changed)[1] | fields))
        found = load_adapter(changed, config, 16)
        assert found.content_hash == want and found.targets == ("k_proj", "v_proj", "up_proj")
        assert not found.differences


def test_a_base_with_biases(tmp_path: Path) -> None:
    base = tiny_model(tmp_path, "Qwen2", num_hidden_layers=1)
    (adapter,) = ia3_adapters(base, [PAPER])
    loaded = load_adapter(adapter, LlamaConfig.from_directory(base.path), 16)
    with pytest.raises(ValueError, match=r"--lora-parts ia3 bias "):
        check_fits(loaded, LoraShape(1, 16))
    with pytest.raises(ValueError, match=r"IA3's factors of biases.* --lora-parts dora bias "):
        check_fits(loaded, LoraShape(1, 16, parts=("dora",)))
    with LLM(base.path, {"ia3": adapter}, **SMALL) as llm:
        assert answers(llm, "ia3", None) == [oracle_greedy(base, each, PROMPT, 5) for each in (adapter, None)]


def test_updates_from_memory_and_sums(base: TinyBase, paths: dict[str, Path]) -> None:
    with LLM(base.path, paths, max_loras=3, **SMALL) as llm:
        for name in ("paper", "lora", "everywhere"):
            llm.update_adapter("policy", *stored(paths[name]), inflight="switch")
            assert answers(llm, "policy") == [oracle_greedy(base, paths[name], PROMPT, 5)]
        with pytest.raises(RequestError, match="'paper' cannot be part of a sum: it has ia3 besides plain LoRA"):
            llm.generate([PROMPT], GREEDY, adapter={"paper": 0.5, "lora": 0.5}, use_tqdm=False)
        assert answers(llm, "paper") == [oracle_greedy(base, paths["paper"], PROMPT, 5)]


K, UP, DOWN = (
    f"base_model.model.model.layers.0.{name}.ia3_l" for name in ("self_attn.k_proj", "mlp.up_proj", "mlp.down_proj")
)
BAD: dict[str, tuple[Callable[[Tensors, Fields], Any], str]] = {
    "another width": (lambda t, c: t.update({K: torch.ones(96, 1)}), r"ia3_l' has shape \[96, 1\], expected \[128"),
    "flat": (lambda t, c: t.update({K: torch.ones(128)}), r"has shape \[128\], expected"),
    "empty": (lambda t, c: t.update({K: torch.ones(0, 1)}), "shape|empty|elements"),
    "NaN": (lambda t, c: t[K].fill_(float("nan")), "has NaN, infinity"),
    "huge": (lambda t, c: t[DOWN].fill_(70000.0), "magnitudes of 65536 or more"),
    "no vectors": (lambda t, c: t.clear(), "holds no IA3 tensors|no tensors"),
    "another type": (lambda t, c: t.update({K: torch.ones(128, 1, dtype=torch.int32)}), "dtype"),
    "factors of other inputs": (
        lambda t, c: (c.update(feedforward_modules=["k_proj", "down_proj"]), t.update({K: torch.ones(1, 128)})),
        r"factors of the inputs of k_proj; only those of down_proj .*feedforward_modules=\['down_proj'\]",
    ),
    "outputs, says the config": (lambda t, c: c.update(feedforward_modules=[]), "does not include it"),
    "inputs, says the config": (lambda t, c: c.update(feedforward_modules=r".*\.[kd]\w*_proj"), "includes it"),
    "feedforward beyond targets": (
        lambda t, c: c.update(feedforward_modules=["down_proj", "fc2"]), "names 'fc2', which target_modules does not"
    ),
    "another type of a field": (lambda t, c: c.update(feedforward_modules=3), "feedforward_modules must be a string"),
    "a bad pattern": (lambda t, c: c.update(feedforward_modules="("), "feedforward_modules: a pattern"),
    "an unknown target": (
        lambda t, c: (c["target_modules"].append("fc1"), t.update({K.replace("k_proj", "fc1"): torch.ones(128, 1)})),
        "fc1.ia3_l' is not",
    ),
    "the output head": (
        lambda t, c: t.update({"base_model.model.lm_head.ia3_l": torch.ones(320, 1)}),
        "adapts lm_head, for which only LoRA",
    ),
    "a layer beyond": (lambda t, c: t.update({K.replace("layers.0", "layers.7"): torch.ones(128, 1)}), "layer 7 of 1"),
    "Conv1D": (lambda t, c: c.update(fan_in_fan_out=True), "fan_in_fan_out is set: transposed weights"),
    "LoRA's fields": (lambda t, c: c.update(r=8), "unknown field 'r'"),
    "LoRA's tensors": (
        lambda t, c: t.update({K.replace("ia3_l", f"lora_{side}.weight"): torch.ones(4, 128) for side in "AB"}),
        "lora_A.weight' is not of IA3",
    ),
    "LoRA's config": (lambda t, c: (c.clear(), c.update(peft_type="LORA", r=8)), "is not of LoRA"),
    "another task": (lambda t, c: c.update(task_type="SEQ_CLS"), "task_type = 'SEQ_CLS'"),
    "other saved modules": (lambda t, c: c.update(modules_to_save=["norm"]), "modules_to_save names 'norm'"),
    "vectors of two adapters": (
        lambda t, c: t.update({K.replace("ia3_l", "ia3_l.other"): torch.ones(128, 1)}), "which one was trained"
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def served(base: TinyBase, paths: dict[str, Path]) -> Any:
    with LLM(base.path, paths, max_loras=5, **SMALL) as llm:
        yield llm


@pytest.mark.parametrize("kind", BAD)
def test_bad_files_change_nothing(
    base: TinyBase, paths: dict[str, Path], tmp_path: Path, served: LLM, kind: str
) -> None:
    change, message = BAD[kind]
    bad = Path(shutil.copytree(paths["paper"], tmp_path / "bad"))
    tensors, config = stored(bad)
    change(tensors, config)
    save_file({name: value.contiguous() for name, value in tensors.items()}, bad / WEIGHTS)
    (bad / CONFIG).write_text(json.dumps(config))
    with pytest.raises(AdapterError, match=message):
        served.add_adapter("bad", bad)
    if tensors:
        with pytest.raises((AdapterError, RequestError)):
            served.update_adapter("bad", tensors, config)
    assert "bad" not in served.adapters
    assert answers(served, "paper") == [oracle_greedy(base, paths["paper"], PROMPT, 5)]


def test_vectors_that_are_missing_are_served_without(
    base: TinyBase, paths: dict[str, Path], tmp_path: Path, served: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    """As in PEFT, where a vector without a tensor stays one."""
    part = Path(shutil.copytree(paths["everywhere"], tmp_path / "part"))
    tensors, _ = stored(part)
    save_file({name: value for name, value in tensors.items() if name not in (K, UP)}, part / WEIGHTS)
    served.add_adapter("part", part)
    assert "2 modules targeted by adapter_config.json have no tensors (served without IA3)" in caplog.text
    try:
        assert answers(served, "part") == [oracle_greedy(base, part, PROMPT, 5)]
    finally:
        served.remove_adapter("part")
