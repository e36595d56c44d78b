"""Checkpoints that are stored in eight bits already, as compressed-tensors lays them out: their values and scales reach
the programs as they are, and transformers computes the same from the products of the two.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import sidestream
import torch
from safetensors.torch import load_file, save_file
from sidestream.compiler.options import CompileOptions, OptionError
from sidestream.graphs.checkpoint import Checkpoint, CheckpointError
from sidestream.graphs.config import LlamaConfig
from sidestream.graphs.config_fields import ConfigError
from sidestream.graphs.llama import Llama
from sidestream.runtime.worker.weight_loader import checkpoint_lookup, load_weights
from support.compiled import CompiledRunner
from support.families import FAMILIES
from support.paged import Chunk, PagedRunner, plain_model
from support.tiny import AdapterSpec, TinyBase, oracle_logits, tiny_adapters, tiny_model
from torch.nn.functional import kl_div, log_softmax

CPU = torch.device("cpu")
TOKENS = [3, 14, 15, 92, 65, 35, 89, 79]
FORMATS = {"int8": ("int-quantized", "int"), "fp8": ("float-quantized", "float")}


def scheme(precision: str, ignore: Sequence[str] = ("lm_head",)) -> dict[str, Any]:
    layout, kind = FORMATS[precision]
    both = {"num_bits": 8, "type": kind, "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**both, "strategy": "channel", "dynamic": False},
        "input_activations": {**both, "strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "ignore": list(ignore),
        "config_groups": {"group_0": group},
    }


def store(
    base: TinyBase, precision: str, plain: Sequence[str] = (), ignore: Sequence[str] = ("lm_head",)
) -> dict[str, Any]:
    """Rewrites a checkpoint's projections, but for `plain`, in eight bits; the base's own model gets what they stand
    for. Returns the new config.
    """
    tensors = load_file(base.path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        if name.removesuffix(".weight") in plain:
            continue
        largest = tensors[name].abs().amax(1, keepdim=True)
        scale = (largest / (127.5 if precision == "int8" else 448)).bfloat16()
        whole = tensors[name] / scale.float()
        stored = whole.round().clamp(-128, 127).to(torch.int8) if precision == "int8" else whole.to(torch.float8_e4m3fn)
        tensors[name], tensors[f"{name}_scale"] = stored, scale
        base.model.state_dict()[name].copy_(stored.float() * scale.float())
    save_file(tensors, base.path / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((base.path / "config.json").read_text())
    fields["quantization_config"] = scheme(precision, ignore)
    (base.path / "config.json").write_text(json.dumps(fields))
    return fields


@pytest.mark.parametrize(("family", "precision"), [("Llama", "int8"), ("Phi3", "int8"), ("Qwen2", "fp8")])
def test_values_and_scales_are_kept_and_logits_follow(tmp_path: Path, family: str, precision: str) -> None:
    """Phi-4-mini's heads are arranged, and longrope's factor is taken out of what RoPE does not turn: of the scales."""
    wide = {"Llama": {}, "Phi3": FAMILIES["phi3-partial"][1]}.get(family, {"hidden_size": 256, "pad_token_id": 0})
    base = tiny_model(tmp_path, family, **{"num_hidden_layers": 1, **wide})
    targets = ("o_proj",) if family == "Phi3" else ("q_proj", "down_proj")
    (adapter,) = tiny_adapters(base, [AdapterSpec(targets=targets)])
    store(base, precision)
    want = oracle_logits(base, adapter, TOKENS)
    plain, _ = plain_model(base, [adapter])
    got = PagedRunner(plain, 1).step([Chunk(0, TOKENS, 0)])[0]
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
    exact = CompiledRunner(plain, CompileOptions(precision="fp32"), 1).step([Chunk(0, TOKENS, 0)])[0]
    torch.testing.assert_close(exact, want, atol=1e-4, rtol=0)
    model, _ = plain_model(base, [adapter], torch.bfloat16)
    runner = CompiledRunner(model, CompileOptions(precision=precision), 1)
    eight = runner.step([Chunk(0, TOKENS, 0)])[0]
    assert kl_div(log_softmax(eight, -1), log_softmax(want, -1), log_target=True, reduction="batchmean") < 2e-2
    config = LlamaConfig.from_directory(base.path)
    lookup, names = checkpoint_lookup(base.path, model.checkpoint_tensors(), config)
    loaded = load_weights(runner.compiled.recipes, lookup, names, model.derived_tensors(), CPU, torch.bfloat16)
    stored = Checkpoint(base.path, config)
    for part, packed in (("o_proj", ["o_proj"]), ("q_k_v_proj", ["q_proj", "k_proj", "v_proj"])):
        values, scales = (
            next(value for name, value in loaded.items() if name.endswith(f"self_attn_{part}_weight{kind}"))
            for kind in (f"_dequantized_{precision}", "_dequantized_scale")
        )
        home = [f"model.layers.0.self_attn.{name}.weight" for name in packed]
        assert torch.equal(
            values.view(torch.uint8), torch.cat([stored.tensor(name).view(torch.uint8) for name in home])
        )
        assert torch.equal(scales, torch.cat([stored.tensor(f"{name}_scale") for name in home]).float().flatten())


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_a_tied_model_keeps_a_head_of_its_own(tmp_path: Path, precision: str) -> None:
    base = tiny_model(tmp_path, "Qwen2", num_hidden_layers=1, tie_word_embeddings=True)
    path = base.path / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
    store(base, precision)
    want = oracle_logits(base, None, TOKENS)
    model, _ = plain_model(base, [], torch.bfloat16)
    eight = CompiledRunner(model, CompileOptions(precision=precision), 1).step([Chunk(0, TOKENS, 0)])[0]
    assert kl_div(log_softmax(eight, -1), log_softmax(want, -1), log_target=True, reduction="batchmean") < 2e-2
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"lm_head.weight' has dtype I8, expected one of BF16"):
        plain_model(base)


def test_another_precision_of_eight_bits_is_refused(tmp_path: Path) -> None:
    base = tiny_model(tmp_path, "Llama", num_hidden_layers=1, tokenizer=True)
    store(base, "fp8")
    with pytest.raises(OptionError, match="start with precision='fp8', or 'bf16'"):
        sidestream.LLM(str(base.path), precision="int8")


def test_values_of_another_dtype_than_the_config_says_are_refused(tmp_path: Path) -> None:
    base = tiny_model(tmp_path, "Llama", num_hidden_layers=1)
    store(base, "fp8")
    fields = json.loads((base.path / "config.json").read_text())
    config = LlamaConfig.from_dict({**fields, "quantization_config": scheme("int8")})
    with pytest.raises(CheckpointError, match="has dtype F8_E4M3, quantization_config implies I8"):
        Checkpoint(base.path, config).validate(Llama(config, device="meta").checkpoint_tensors())


IGNORED = {
    "Llama": ("re:.*lm_head", "model.layers.0.mlp.down_proj", "re:model\\.layers\\.1\\.self_attn", "vision_tower.fc1"),
    "Phi3": ("lm_head", "re:.*layers.0.*qkv"),
}
PLAIN = {
    "Llama": ["model.layers.0.mlp.down_proj", *(f"model.layers.1.self_attn.{name}_proj" for name in "qkvo")],
    "Phi3": ["model.layers.0.self_attn.qkv_proj"],
}


@pytest.mark.parametrize("family", ["Llama", "Phi3"])
def test_projections_that_the_config_ignores_are_read_in_16_bits(tmp_path: Path, family: str) -> None:
    wide = {} if family == "Llama" else {"hidden_size": 256, "pad_token_id": 0}
    base = tiny_model(tmp_path, family, num_hidden_layers=2, **wide)
    targets = ("o_proj",) if family == "Phi3" else ("q_proj", "down_proj")
    (adapter,) = tiny_adapters(base, [AdapterSpec(targets=targets)])
    store(base, "int8", PLAIN[family], IGNORED[family])
    want = oracle_logits(base, adapter, TOKENS)
    plain, _ = plain_model(base, [adapter])
    exact = CompiledRunner(plain, CompileOptions(precision="fp32"), 1).step([Chunk(0, TOKENS, 0)])[0]
    torch.testing.assert_close(exact, want, atol=1e-4, rtol=0)
    model, _ = plain_model(base, [adapter], torch.bfloat16)
    options = CompileOptions(precision="int8", rotate_values=True)  # of those that are in 16 bits
    eight = CompiledRunner(model, options, 1).step([Chunk(0, TOKENS, 0)])[0]
    assert kl_div(log_softmax(eight, -1), log_softmax(want, -1), log_target=True, reduction="batchmean") < 1e-2


def test_a_tied_head_need_not_be_ignored(tmp_path: Path) -> None:
    base = tiny_model(tmp_path, "Llama", num_hidden_layers=1, tie_word_embeddings=True)
    fields = store(base, "int8", ignore=())
    model, _ = plain_model(base, [])
    got = PagedRunner(model, 1).step([Chunk(0, TOKENS)])[0]
    torch.testing.assert_close(got, oracle_logits(base, None, TOKENS), atol=1e-4, rtol=0)
    with pytest.raises(ConfigError, match="ignore does not list lm_head"):
        LlamaConfig.from_dict({**fields, "tie_word_embeddings": False})


@pytest.mark.parametrize(
    ("ignore", "message"),
    [
        (
            ["lm_head", "re:.*0.self_attn.k_proj"],
            r"leaves k_proj of model.layers.0.self_attn in 16 bits, .* use the original checkpoint in bf16",
        ),
        (["lm_head", "re:(?!model).*"], "ignore: a pattern has look-ahead.*list the modules by name"),
        (["lm_head", 3], "ignore must be a list of names"),
        (None, "ignore must be a list of names"),
    ],
)
def test_what_cannot_be_ignored_is_said(tmp_path: Path, ignore: Any, message: str) -> None:
    fields = json.loads((tiny_model(tmp_path, "Llama", num_hidden_layers=1).path / "config.json").read_text())
    with pytest.raises(ConfigError, match=message):
        LlamaConfig.from_dict({**fields, "quantization_config": {**scheme("int8"), "ignore": ignore}})


def test_patterns_take_linear_time(tmp_path: Path) -> None:
    """Python's re does not come back from the first of these."""
    fields = json.loads((tiny_model(tmp_path, "Llama", num_hidden_layers=1).path / "config.json").read_text())
    slow = ["re:" + ".?" * 120 + "Z", "re:(a|b|.)*.*.*.*.*.*Z"]
    config = LlamaConfig.from_dict({**fields, "quantization_config": scheme("int8", ["lm_head", *slow])})
    assert config.plain_projections == ()
