"""Adapters with magnitudes (DoRA) and biases in an engine: batches with others, limits, caches, adapters that are
refused while the engine lives on.
"""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sidestream.compiler.options import OptionError
from sidestream.graphs.adapter import load_adapter
from sidestream.graphs.adapter_config import AdapterError
from sidestream.graphs.config import LlamaConfig
from sidestream.runtime.api.errors import RequestError
from sidestream.runtime.api.sampling_params import SamplingParams
from sidestream.runtime.llm import LLM
from support.tiny import AdapterSpec, TinyBase, oracle_greedy, tiny_adapters, tiny_model

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
SPECS = {
    "lora": AdapterSpec(rank=8),
    "dora": AdapterSpec(rank=4, extra={"use_dora": True}),
    "biased": AdapterSpec(rank=4, targets=("o_proj",), extra={"bias": "all"}),
    "b_biased": AdapterSpec(rank=4, targets=("q_proj", "down_proj"), extra={"lora_bias": True}),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TinyBase:
    return tiny_model(
        tmp_path_factory.mktemp("model"), "Qwen2", num_hidden_layers=1, num_attention_heads=2, hidden_size=128
    )


@pytest.fixture(scope="module")
def paths(base: TinyBase) -> dict[str, Path]:
    return dict(zip(SPECS, tiny_adapters(base, list(SPECS.values())), strict=True))


def answers(llm: LLM, *adapters: str | None) -> list[list[int]]:
    outputs = llm.generate([PROMPT] * len(adapters), GREEDY, adapter=list(adapters), use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def edited(path: Path, target: Path, **changes: torch.Tensor) -> Path:
    """A copy of an adapter with other tensors; names without `base_model.model.model.layers.0.`."""
    copied = Path(shutil.copytree(path, target))
    tensors = load_file(copied / WEIGHTS)
    save_file(
        tensors | {f"base_model.model.model.layers.0.{name}": value for name, value in changes.items()},
        copied / WEIGHTS,
    )
    return copied


def test_every_kind_alone_and_together_answers_as_peft(base: TinyBase, paths: dict[str, Path]) -> None:
    names = [*SPECS, None]
    want = [oracle_greedy(base, None if name is None else paths[name], PROMPT, 5) for name in names]
    assert len({tuple(each) for each in want}) > 3
    with LLM(base.path, paths, **SMALL) as llm:
        assert [answers(llm, name)[0] for name in names] == want
        assert answers(llm, *names) == want
        assert answers(llm, "lora", None) == [want[0], want[-1]]


def test_only_steps_with_such_adapters_run_the_full_program(base: TinyBase, paths: dict[str, Path]) -> None:
    with LLM(base.path, paths, **SMALL) as llm:
        programs = llm.model.runner.programs._programs
        answers(llm, "lora", None)
        assert programs and not any(bucket.parts for bucket in programs)
        answers(llm, "lora", "dora")
        assert any(bucket.parts for bucket in programs)


def test_parts_that_the_engine_was_not_started_with(base: TinyBase, paths: dict[str, Path]) -> None:
    with LLM(base.path, {"lora": paths["lora"]}, max_loras=3, **SMALL) as llm:
        with pytest.raises(RequestError, match=r"magnitudes \(DoRA\).* --lora-parts dora .*lora_parts=\['dora'\]"):
            llm.add_adapter("dora", paths["dora"])
        with pytest.raises(RequestError, match=r"trained biases.* --lora-parts bias "):
            llm.add_adapter("biased", paths["biased"])
        assert answers(llm, "lora") == [oracle_greedy(base, paths["lora"], PROMPT, 5)]
    with LLM(base.path, {"lora": paths["lora"]}, max_loras=3, lora_parts=["dora", "bias"], **SMALL) as llm:
        llm.add_adapter("dora", paths["dora"])
        llm.add_adapter("biased", paths["biased"])
        want = [oracle_greedy(base, paths[name], PROMPT, 5) for name in ("biased", "dora", "lora")]
        assert answers(llm, "biased", "dora", "lora") == want
    with pytest.raises(OptionError, match=r"adapter 'dora': .*--lora-parts bias dora"):
        LLM(base.path, {"dora": paths["dora"]}, lora_parts=["bias"], **SMALL)
    for wrong in ("gain", ["dora", 3], 3):
        with pytest.raises(OptionError, match=r"lora_parts=.* must be some of dora, ia3, bias, or \[\] for none"):
            LLM(base.path, {"dora": paths["dora"]}, lora_parts=wrong, **SMALL)


def test_equal_bytes_of_two_kinds_have_two_hashes(base: TinyBase, paths: dict[str, Path], tmp_path: Path) -> None:
    """Or the prefix cache would share pages of different adapters."""
    biased = Path(shutil.copytree(paths["dora"], tmp_path / "biased"))
    tensors = load_file(biased / WEIGHTS)
    renamed = {name.replace("lora_magnitude_vector", "lora_B.bias"): value for name, value in tensors.items()}
    save_file(renamed, biased / WEIGHTS)
    fields = json.loads((biased / "adapter_config.json").read_text()) | {"use_dora": False, "lora_bias": True}
    (biased / "adapter_config.json").write_text(json.dumps(fields))
    config = LlamaConfig.from_directory(base.path)
    dora, bias = (load_adapter(each, config, 16) for each in (paths["dora"], biased))
    assert (dora.kinds, bias.kinds) == (("dora",), ("bias",)) and dora.content_hash != bias.content_hash


def test_one_slot_changes_between_kinds(base: TinyBase, paths: dict[str, Path]) -> None:
    with LLM(base.path, paths, max_loras=1, max_cpu_loras=1, **SMALL) as llm:
        for name in ("dora", "lora", "biased", "lora", "dora"):
            assert answers(llm, name) == [oracle_greedy(base, paths[name], PROMPT, 5)]


def test_kept_slots_belong_to_the_weights_of_one_base(
    base: TinyBase, paths: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fine-tuned base has the same config and other norms."""
    monkeypatch.setenv("SIDESTREAM_CACHE", str(tmp_path / "cache"))
    tuned = copy.deepcopy(base.model)
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter.mul_(1.5)
    tuned.save_pretrained(tmp_path / "tuned")
    for _ in range(2):
        for each in (base, TinyBase(tmp_path / "tuned")):
            with LLM(each.path, {"dora": paths["dora"]}, **SMALL) as llm:
                assert answers(llm, "dora") == [oracle_greedy(each, paths["dora"], PROMPT, 5)]
                llm.model.runner.slot_loader.store.disk_cache.jobs.flush(60)


VALUES = {
    "a zero": (0.0, "has the magnitude 0 in row 3 of its lora_magnitude_vector, expected values above 0"),
    "negative": (-2.0, "has the magnitude -2 in row 3"),
    "not a number": (float("nan"), "NaN, infinity"),
    "infinite": (float("inf"), "NaN, infinity"),
}


@pytest.mark.parametrize("kind", VALUES)
def test_magnitudes_that_are_no_norms(base: TinyBase, paths: dict[str, Path], tmp_path: Path, kind: str) -> None:
    value, message = VALUES[kind]
    name = "self_attn.v_proj.lora_magnitude_vector"
    magnitude = load_file(paths["dora"] / WEIGHTS)[f"base_model.model.model.layers.0.{name}"]
    magnitude[3] = value
    bad = edited(paths["dora"], tmp_path / "bad", **{name: magnitude})
    with LLM(base.path, paths, max_loras=5, **SMALL) as llm:
        with pytest.raises(AdapterError, match=message):
            llm.add_adapter("bad", bad)
        assert answers(llm, "dora") == [oracle_greedy(base, paths["dora"], PROMPT, 5)]


def test_a_row_of_zeros_fails_the_requests_of_its_adapter(
    base: TinyBase, paths: dict[str, Path], tmp_path: Path
) -> None:
    model = copy.deepcopy(base.model)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[5] = 0.0
    model.save_pretrained(tmp_path / "zeros")
    name = "mlp.up_proj.lora_B.weight"
    b = load_file(paths["dora"] / WEIGHTS)[f"base_model.model.model.layers.0.{name}"]
    b[5] = 0.0
    bad = edited(paths["dora"], tmp_path / "bad", **{name: b})
    with LLM(tmp_path / "zeros", {"bad": bad, "lora": paths["lora"]}, **SMALL) as llm:
        outputs = llm.generate([PROMPT] * 2, GREEDY, adapter=["bad", "lora"], use_tqdm=False)
        assert [output.outputs[0].finish_reason for output in outputs] == ["error", "length"]
        assert "norm of row 5 of the base's weight with LoRA is 0" in str(outputs[0].outputs[0].stop_reason)
        assert answers(llm, "lora") == [oracle_greedy(TinyBase(tmp_path / "zeros"), paths["lora"], PROMPT, 5)]
