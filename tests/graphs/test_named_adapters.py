"""Adapters as people name and save them: what an unambiguous name means, what other names of tensors mean, and remedies
that work.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from sidestream.graphs.adapter import Adapter, load_adapter
from sidestream.graphs.adapter_config import AdapterError
from sidestream.graphs.config import LlamaConfig
from sidestream.graphs.model_directory import adapter_directory
from sidestream.runtime.api.sampling_params import SamplingParams
from sidestream.runtime.llm import LLM
from support.tiny import AdapterSpec, TinyBase, oracle_greedy, tiny_adapters, tiny_llama, tiny_model

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 123456\n".format("4d" * 32)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TinyBase:
    return tiny_llama(tmp_path_factory.mktemp("named"))


@pytest.fixture(scope="module")
def original(base: TinyBase) -> Path:
    return tiny_adapters(base, [AdapterSpec(rank=4, targets=("k_proj", "up_proj"))])[0]


@pytest.fixture
def adapter(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "adapter"))


def load(base: TinyBase, path: Path) -> Adapter:
    return load_adapter(path, LlamaConfig.from_directory(base.path), 64)


def rename(path: Path, *pairs: tuple[str, str]) -> None:
    tensors = load_file(path / WEIGHTS)
    for old, new in pairs:
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    save_file(tensors, path / WEIGHTS)


@pytest.mark.parametrize(
    "pairs",
    [
        [("base_model.model.", "base_model.model._orig_mod.")],
        [("base_model.model.model.", "base_model.model.model._orig_mod.")],
        [("base_model.model.", "base_model.model.base_model.model.base_model.model.")],
        [("base_model.model.", "_orig_mod.base_model.model.base_model.model.")],
        [(".lora_A.", ".lora_A.chat-v2."), (".lora_B.", ".lora_B.chat-v2.")],
        [("mlp.", "mlp._fsdp_wrapped_module."), ("self_attn.", "_checkpoint_wrapped_module.self_attn.")],
        [("base_model.model.", "")],
    ],
    ids=str,
)
def test_other_names_of_the_same_tensors_mean_the_same(
    base: TinyBase, original: Path, adapter: Path, pairs: list[tuple[str, str]]
) -> None:
    rename(adapter, *pairs)
    assert load_file(adapter / WEIGHTS).keys() != load_file(original / WEIGHTS).keys()
    found, wanted = load(base, adapter), load(base, original)
    assert found.tensors.keys() == wanted.tensors.keys() and found.scaling == wanted.scaling
    for module, (a, b) in wanted.tensors.items():
        assert torch.equal(found.tensors[module][0], a) and torch.equal(found.tensors[module][1], b)


def test_two_adapters_in_one_file_are_refused(base: TinyBase, adapter: Path) -> None:
    rename(adapter, ("k_proj.lora_A.", "k_proj.lora_A.one."), ("k_proj.lora_B.", "k_proj.lora_B.one."))
    with pytest.raises(AdapterError, match=r"adapters with different names: .*selected_adapters"):
        load(base, adapter)


def test_a_wrapper_does_not_make_a_foreign_module_ours(base: TinyBase, adapter: Path) -> None:
    rename(adapter, ("base_model.model.", "base_model.model._orig_mod.vision."))
    with pytest.raises(AdapterError, match="is not LoRA A or B of a projection of this base: merge the adapter"):
        load(base, adapter)


def test_the_remedy_for_an_adapter_that_peft_saved_under_its_name(base: TinyBase, tmp_path: Path) -> None:
    wrapped = get_peft_model(
        base.model, LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=["v_proj"]), adapter_name="chat-v2"
    )
    wrapped.save_pretrained(tmp_path / "out")
    wrapped.unload()
    with pytest.raises(AdapterError, match="but there is one in its folder chat-v2") as refused:
        adapter_directory(tmp_path / "out")
    assert load(base, Path(str(refused.value).rpartition("give ")[2])).rank == 2
    with pytest.raises(AdapterError, match="in its folder chat-v2"):
        load(base, tmp_path / "out")


def test_what_stands_for_an_adapters_directory(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(original, tmp_path / "mine")
    monkeypatch.setenv("HOME", str(tmp_path))
    for named in ("~/mine", tmp_path / "mine", tmp_path / "mine" / WEIGHTS, f"~/mine/{CONFIG}", f"{tmp_path}/mine/"):
        assert adapter_directory(named) == tmp_path / "mine"


def test_a_hub_id_is_found_in_the_local_cache(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(AdapterError, match="run `hf download ann/sql-lora --local-dir adapters/sql-lora`"):
        adapter_directory("ann/sql-lora")
    home = tmp_path / "models--ann--sql-lora"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("1" * 40)
    shutil.copytree(original, home / "snapshots" / ("1" * 40))
    assert adapter_directory("ann/sql-lora") == home / "snapshots" / ("1" * 40)


def test_what_is_no_adapter_is_called_what_it_is(base: TinyBase, adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").write_text("x")
    for place, words in (
        (base.path, "contains a model .*not an adapter"),
        (tmp_path / "nowhere", "nowhere does not exist"),
        (tmp_path / "empty", "empty/adapter_config.json does not exist: give the directory with"),
        (tmp_path / "file.txt", "is a file, not an adapter's directory"),
        ("~nobody-of-this-name/x", "cannot be read"),
        ("x" * 5000, "File name too long"),
    ):
        with pytest.raises(AdapterError, match=words):
            adapter_directory(place)
    (adapter / CONFIG).unlink()
    with pytest.raises(AdapterError, match=r"has adapter_model.safetensors, but no adapter_config.json: copy"):
        adapter_directory(adapter)


@pytest.mark.parametrize("name", [WEIGHTS, CONFIG])
def test_pointers_of_git_lfs_are_called_so(base: TinyBase, adapter: Path, name: str) -> None:
    (adapter / name).write_text(POINTER)
    with pytest.raises(AdapterError, match=f"{name} is a pointer of Git LFS.*git lfs pull"):
        load(base, adapter)


def test_an_adapter_of_a_deeper_base_is_not_called_damaged(base: TinyBase, tmp_path: Path) -> None:
    deeper = tiny_llama(tmp_path, num_hidden_layers=7)
    (path,) = tiny_adapters(deeper, [AdapterSpec(rank=2)])
    with pytest.raises(AdapterError, match="has 98 tensors; at most 96 are allowed: the adapter was trained on"):
        load(base, path)


def trained_biases(base: TinyBase, place: Path) -> PeftModel:
    """An adapter that changes biases, saved at `place`."""
    options = LoraConfig(r=2, lora_alpha=4, task_type="CAUSAL_LM", target_modules=["k_proj", "down_proj"])
    options.bias = "lora_only"
    wrapped = get_peft_model(base.model, options)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.4)
    wrapped.save_pretrained(place)
    return wrapped


def test_trained_biases_without_their_tensors_are_refused_and_merging_works(tmp_path: Path) -> None:
    base = tiny_model(tmp_path, "Qwen2", hidden_size=256, num_attention_heads=4)
    place, merged = tmp_path / "biased", tmp_path / "merged"
    wrapped = trained_biases(base, place)
    tensors = load_file(place / WEIGHTS)
    assert any(name.endswith(".bias") for name in tensors)
    assert load(base, place).kinds == ("bias",)
    save_file({name: tensor for name, tensor in tensors.items() if ".lora_" in name}, place / WEIGHTS)
    with pytest.raises(AdapterError, match=r"has bias = 'lora_only', but .*k_proj has no bias in"):
        load(base, place)
    config = json.loads((place / CONFIG).read_text())
    (place / CONFIG).write_text(json.dumps(config | {"bias": "none"}))
    save_file(tensors, place / WEIGHTS)
    with pytest.raises(AdapterError, match=r"has bias = 'none', but .*k_proj has a bias in"):
        load(base, place)
    wrapped.merge_and_unload().save_pretrained(merged)
    served = TinyBase(merged)
    prompt = [3, 77, 210, 5, 148]
    with LLM(merged, precision="fp32", device="cpu", max_model_len=64, max_num_seqs=2, show_progress=False) as llm:
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        (output,) = llm.generate([prompt], params, use_tqdm=False)
    assert output.outputs[0].token_ids == oracle_greedy(served, None, prompt, 6)


def test_biases_of_a_base_that_has_none_there_change_nothing(base: TinyBase, adapter: Path) -> None:
    config = json.loads((adapter / CONFIG).read_text())
    (adapter / CONFIG).write_text(json.dumps(config | {"bias": "lora_only"}))
    assert load(base, adapter).rank == 4
