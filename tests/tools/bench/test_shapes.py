"""Every shape of --shape, with small layers: its random adapters fit it, and a bench runs with them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sidestream.graphs.adapter import load_adapter
from sidestream.graphs.adapter_config import AdapterError
from sidestream.graphs.config import LlamaConfig
from sidestream.tools import cli
from sidestream.tools.bench import latency
from sidestream.tools.bench.floors import adapter_bytes
from sidestream.tools.bench.random_model import write_random_adapter
from sidestream.tools.options.models import SHAPES

DISTINCT = [  # others differ from one of these in sizes only
    "llama-3.1-8b",
    "llama-3.2-1b",
    "llama-3.2-3b",
    "mistral-7b",
    "qwen2.5-7b",
    "qwen3-4b",
    "qwen3-8b",
    "smollm3-3b",
    "granite-3.3-8b",
    "phi-3-mini",
    "phi-4",
    "qwen3-30b-a3b",
    "mixtral-8x7b",
]
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
EXPERTS = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
IGNORED = (*SIZES, "vocab_size", "max_position_embeddings", "rope_theta", "rms_norm_eps", "eos_token_id")


STACKS = ("gate_up_proj", "down_proj")


def small(name: str, layers: int = 1) -> dict[str, Any]:
    """The shape's config with its heads' width, grouping, biases, packing and tied head, and small sizes."""
    fields = SHAPES[name]
    grouped = fields["num_attention_heads"] > fields["num_key_value_heads"]
    width = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
    unrotated = {"no_rope_layer_interval": 2, "num_hidden_layers": 2} if "no_rope_layer_interval" in fields else {}
    return {
        **fields,
        "hidden_size": 2 * width,
        "intermediate_size": 160,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1 if grouped else 2,
        "vocab_size": 256,
        "bos_token_id": 0,
        "eos_token_id": 1,
        **{name: value for name, value in EXPERTS.items() if name in fields},
        **unrotated,
    }


def test_the_distinct_shapes_stand_for_all() -> None:
    def structure(name: str) -> str:
        fields = SHAPES[name]
        kept = {key: value for key, value in fields.items() if key not in IGNORED}
        width = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
        grouped = fields["num_attention_heads"] > fields["num_key_value_heads"]
        return json.dumps([kept, width, grouped], sort_keys=True)

    assert {structure(name) for name in SHAPES} == {structure(name) for name in DISTINCT}


@pytest.mark.parametrize("name", SHAPES)
def test_random_adapters_fit_the_shape(tmp_path: Path, name: str) -> None:
    fields = small(name)
    path = write_random_adapter(tmp_path / "adapter", fields, 8, seed=1)
    adapter = load_adapter(path, LlamaConfig.from_dict(fields), 8)
    base, layers = LlamaConfig.from_dict(fields), fields["num_hidden_layers"]
    stacks = [f"model.layers.{layer}.mlp.experts.{name}" for layer in range(layers) for name in STACKS]
    sparse = base.num_experts > 0
    assert set(adapter.tensors) == set(base.linear_modules() + (stacks if sparse else []))
    assert adapter.differences == () and len(adapter.tensors) == (6 if sparse else 7) * layers
    stored = json.loads((Path(path) / "adapter_config.json").read_text())["target_modules"]
    packed = fields["model_type"] == "phi3"
    names = {module.rpartition(".")[2] for module in base.stored_modules()}
    assert stored == sorted(names) and ("qkv_proj" in stored) == packed
    sizes = (Path(path) / "adapter_model.safetensors").stat().st_size
    shared = 2 * 8 * layers * base.num_experts * base.hidden_size  # gate and up have one A in the file
    assert 0 < sizes - adapter_bytes(fields, 8) + shared < 10_000, "the file has a header besides"


@pytest.mark.parametrize("name", ["qwen2.5-7b", "smollm3-3b", "phi-3-mini", "qwen3-30b-a3b"])
def test_peft_takes_the_random_adapters(tmp_path: Path, name: str) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    fields = {**small(name), "pad_token_id": 0}
    path = write_random_adapter(tmp_path / "adapter", fields, 8, seed=1)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**fields))
    with torch.no_grad():
        plain = model(torch.arange(6)[None]).logits
        adapted = peft.PeftModel.from_pretrained(model, path)
        state = peft.get_peft_model_state_dict(adapted)
        assert set(state) == set(peft.utils.load_peft_weights(path, device="cpu"))
        assert not torch.equal(adapted(torch.arange(6)[None]).logits, plain)


@pytest.mark.parametrize("name", DISTINCT)
def test_a_bench_runs_with_adapters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def no_clock(generate: Callable[[int], None], length: int, iterations: int) -> tuple[float, float, float]:
        generate(4)
        return 2.0, 0.0, 1.0

    monkeypatch.setattr(latency, "measure", no_clock)
    shape, target = tmp_path / "config.json", tmp_path / "out.json"
    shape.write_text(json.dumps(small(name)))
    sizes = ["--concurrency", "2", "--input-len", "4", "--output-len", "40", "--num-adapters", "2", "--lora-rank", "8"]
    command = ["bench", "latency", "--shape", str(shape), "--lora", "zipf", *sizes, "--device", "cpu"]
    assert cli.main([*command, "--output-json", str(target)]) == 0
    (row,) = json.loads(target.read_text())["rows"]
    assert row["active_adapters"] > 0 and row["lora"] == "zipf"
    assert "floor: none on a CPU; the JSON has that of 4.68 TB/s (H200)" in capsys.readouterr().out


def refusal(directory: Path, of: dict[str, Any], on: dict[str, Any]) -> str:
    path = write_random_adapter(directory / "adapter", of, 8, seed=1)
    with pytest.raises(AdapterError) as caught:
        load_adapter(path, LlamaConfig.from_dict(on), 8)
    return str(caught.value)


@pytest.mark.parametrize(
    ("of", "on", "named"),
    [
        ("llama-3.1-8b", "phi-4", "gate_proj, but the base has qkv_proj, o_proj, gate_up_proj, down_proj"),
        ("phi-4", "mistral-7b", "gate_up_proj, but the base has q_proj, k_proj, v_proj, o_proj"),
    ],
)
def test_modules_that_the_base_has_not_are_no_damage(tmp_path: Path, of: str, on: str, named: str) -> None:
    said = refusal(tmp_path, small(of), small(on))
    assert named in said and "another base" in said and "damaged" not in said


def test_an_adapter_of_many_more_layers_is_no_damage(tmp_path: Path) -> None:
    said = refusal(tmp_path, small("mistral-7b", layers=5), small("mistral-7b"))
    assert "has 70 tensors; at most 54 are allowed" in said and "another base" in said and "damaged" not in said
    said = refusal(tmp_path / "more", small("phi-4", layers=100), small("phi-4"))
    assert "a header of" in said and "another base" in said and "damaged" not in said
