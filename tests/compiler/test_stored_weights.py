"""Checkpoints that are stored in eight bits already, as compressed-tensors lays them out: their values and scales reach
the programs as they are, and transformers computes the same from the products of the two.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import sidestream
import torch
from safetensors.torch import load_file, save_file
from sidestream.compiler.options import CompileOptions, OptionError
from sidestream.graphs.checkpoint import Checkpoint, CheckpointError
from sidestream.graphs.config import LlamaConfig
from sidestream.graphs.llama import Llama
from sidestream.runtime.device.weights import checkpoint_lookup, load_weights
from support.compiled import CompiledRunner
from support.paged import Chunk, PagedRunner, plain_model
from support.tiny import AdapterSpec, TinyBase, oracle_logits, tiny_adapters, tiny_model
from torch.nn.functional import kl_div, log_softmax

CPU = torch.device("cpu")
TOKENS = [3, 14, 15, 92, 65, 35, 89, 79]
FORMATS = {"int8": ("int-quantized", "int"), "fp8": ("float-quantized", "float")}


def scheme(precision: str) -> dict[str, Any]:
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
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def store(base: TinyBase, precision: str) -> None:
    """Rewrites a checkpoint's projections in eight bits; the base's own model gets what they stand for."""
    tensors = load_file(base.path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        largest = tensors[name].abs().amax(1, keepdim=True)
        scale = (largest / (127.5 if precision == "int8" else 448)).bfloat16()
        whole = tensors[name] / scale.float()
        stored = whole.round().clamp(-128, 127).to(torch.int8) if precision == "int8" else whole.to(torch.float8_e4m3fn)
        tensors[name], tensors[f"{name}_scale"] = stored, scale
        base.model.state_dict()[name].copy_(stored.float() * scale.float())
    save_file(tensors, base.path / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((base.path / "config.json").read_text())
    (base.path / "config.json").write_text(json.dumps({**fields, "quantization_config": scheme(precision)}))


@pytest.mark.parametrize(("family", "precision"), [("Llama", "int8"), ("Phi3", "int8"), ("Qwen2", "fp8")])
def test_values_and_scales_are_kept_and_logits_follow(tmp_path: Path, family: str, precision: str) -> None:
    wide = {} if family == "Llama" else {"hidden_size": 256, "pad_token_id": 0}
    base = tiny_model(tmp_path, family, num_hidden_layers=1, **wide)
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
    with pytest.raises(CheckpointError, match="has dtype F8_E4M3, quantization_config says I8"):
        Checkpoint(base.path, config).validate(Llama(config, device="meta").checkpoint_tensors())
