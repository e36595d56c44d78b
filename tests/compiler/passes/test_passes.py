"""Pass accounting: counts follow from the config, and a pattern that stops matching fails loudly and says why."""

from typing import Any

import pytest
import sidestream
import torch
from sidestream.compiler.expected_matches import PassCountError, model_shape
from sidestream.compiler.options import CompileOptions, OptionError
from sidestream.graphs.config import LlamaConfig
from sidestream.graphs.llama import Llama, RMSNorm
from sidestream.graphs.lora import LoraShape
from support.meta import FIELDS
from torch import nn

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def model(targets: tuple[str, ...] | None = ALL, **fields: Any) -> Llama:
    """A Llama on the meta device: what is captured needs no weights."""
    lora = LoraShape(3, 16, targets) if targets else None
    return Llama(LlamaConfig.from_dict({**FIELDS, **fields}), lora, torch.bfloat16, "meta")


def matches(module: nn.Module, **options: Any) -> dict[str, int]:
    records = sidestream.compile(module, CompileOptions(**options), text=False).records
    return {record.name: record.matches for record in records}


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("targets", [None, ("q_proj",), ALL], ids=["none", "attention", "all"])
def test_counts_follow_from_the_config(layers: int, targets: tuple[str, ...] | None) -> None:
    counts = matches(model(targets, num_hidden_layers=layers, tie_word_embeddings=layers == 3))
    lora = {None: (0, 0), ("q_proj",): (3, 1), ALL: (7, 4)}[targets]
    assert counts["lift_rms_norm"] == 2 * layers + 1
    assert counts["lift_rope"] == counts["pack_projections"] == counts["fuse_add_rms_norm"] == 2 * layers
    assert counts["fuse_silu_mul"] == counts["quantize_kv"] == counts["fuse_rope_append"] == layers
    assert counts["quantize_linears"] == 4 * layers + 1 and counts["fuse_quantize"] == 4 * layers
    assert (counts["lift_lora"], counts["lower_lora"]) == (lora[0] * layers, lora[1] * layers)


@pytest.mark.parametrize("targets", [("q_proj",), ("o_proj",), ("gate_proj",), ("down_proj",), ("q_proj", "up_proj")])
def test_lora_that_is_not_lifted_leaves_the_other_projections_fused(targets: tuple[str, ...]) -> None:
    counts = matches(model(targets), disable=("lift_lora",))
    assert counts["fuse_rope_append"] == int("q_proj" not in targets)
    assert counts["fuse_silu_mul"] == int(not {"gate_proj", "up_proj"} & set(targets))


def test_a_layer_is_nine_kernels_on_the_main_lane_and_eight_next_to_it() -> None:
    one, two = (
        sidestream.compile(model(num_hidden_layers=layers), text=False).records[-1].ops_after for layers in (1, 2)
    )
    layer = {name: two[name] - one.get(name, 0) for name in two if two[name] != one.get(name, 0)}
    side = {name: count for name, count in layer.items() if "lora" in name}
    assert side == {"sidestream.lora_shrink": 4, "sidestream.lora_expand": 4}
    assert sum(layer.values()) - sum(side.values()) == 9


def test_options_decide_which_passes_apply() -> None:
    assert (
        matches(model(), precision="bf16")["quantize_linears"] == matches(model(), precision="bf16")["quantize_kv"] == 0
    )
    assert matches(model(), kv_dtype="bf16")["quantize_kv"] == 0
    assert matches(model(), lm_head="bf16")["quantize_linears"] == 4
    kept = sidestream.compile(model(), CompileOptions(lm_head="bf16"), text=False).records
    assert "lm_head='bf16'" in next(record for record in kept if record.name == "quantize_linears").rejected[0]


@pytest.mark.parametrize("lora_input", ["bf16", "auto"])
@pytest.mark.parametrize(("precision", "dtype"), [("fp8", torch.float8_e4m3fn), ("int8", torch.int8)])
def test_adapters_get_eight_bits_with_a_scale_a_row(lora_input: str, precision: Any, dtype: torch.dtype) -> None:
    compiled = sidestream.compile(
        model(), CompileOptions(precision=precision, lora_dtype=precision, lora_input=lora_input), text=False
    )
    assert next(record for record in compiled.records if record.name == "quantize_lora").matches == 4
    specs = {
        node.name: node.meta["val"] for node in compiled.graph_module.graph.nodes if node.meta.get("kind") == "adapter"
    }
    assert set(specs) == set(compiled.adapter_recipes) and len(specs) == 16
    for name, value in specs.items():
        assert value.dtype == (torch.float32 if name.endswith("_scale") else dtype), name
        assert (
            not name.endswith("_scale") or value.shape == specs[f"{name.removesuffix('_scale')}_{precision}"].shape[:-1]
        )
    shrinks = [
        node for node in compiled.graph_module.graph.nodes if node.target == torch.ops.sidestream.lora_shrink.default
    ]
    quantized = lora_input == "auto"
    assert [node.args[0].meta["val"].dtype == dtype and node.args[7] is not None for node in shrinks] == [quantized] * 4
    norms = [
        node
        for node in compiled.graph_module.graph.nodes
        if node.target == torch.ops.sidestream.add_rms_norm_quant.default
    ]
    assert [node.args[5] for node in norms] == [not quantized] * len(norms) and norms


def test_adapters_stay_as_they_are() -> None:
    """Switched off by name, by option, by precision, or with activations that nothing quantizes."""
    assert "quantize_lora" not in matches(model(), precision="fp8", lora_dtype="fp8", disable=("quantize_lora",))
    assert (
        matches(model(), lora_dtype="bf16")["quantize_lora"] == matches(model(), precision="bf16")["quantize_lora"] == 0
    )
    compiled = sidestream.compile(
        model(),
        CompileOptions(precision="fp8", lora_dtype="fp8", lora_input="fp8", disable=("quantize_linears",)),
        text=False,
    )
    shrinks = [
        node for node in compiled.graph_module.graph.nodes if node.target == torch.ops.sidestream.lora_shrink.default
    ]
    assert len(shrinks) == 4 and all(
        node.args[0].meta["val"].dtype == torch.bfloat16 and node.args[7] is None for node in shrinks
    )
    for options in (
        {"precision": "bf16", "lora_dtype": "fp8"},
        {"precision": "fp8", "lora_dtype": "bf16", "lora_input": "fp8"},
        {"precision": "int8", "lora_dtype": "fp8"},
    ):
        with pytest.raises(OptionError, match="lora_"):
            CompileOptions(**options)  # type: ignore[arg-type]


class OtherNorm(RMSNorm):
    """The same norm, spelled with a square root and a division."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        return self.weight * (wide / torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class NosyNorm(RMSNorm):
    """The same norm, whose 1 / rms somebody else reads as well."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * inverse).to(x.dtype) + 0.0 * torch.neg(inverse).to(x.dtype)


@pytest.mark.parametrize(
    ("norm", "reason"), [(OtherNorm, "there is no near-miss"), (NosyNorm, r"rsqrt_2 is also used by neg")]
)
def test_a_pattern_that_stops_matching_fails_and_says_why(norm: type[RMSNorm], reason: str) -> None:
    module = model()
    old = module.model.norm
    module.model.norm = norm(128, old.eps, torch.bfloat16, torch.device("meta"))
    with pytest.raises(PassCountError, match=rf"lift_rms_norm matched 2 times, but 1 layers imply 3(.|\n)*{reason}"):
        sidestream.compile(module, text=False)
    records = sidestream.compile(module, CompileOptions(check_counts=False), text=False).records
    assert next(record for record in records if record.name == "lift_rms_norm").matches == 2


def test_a_bias_becomes_a_sum_of_its_own() -> None:
    """Then the linear is quantized as any other; with its bias it stays in ATen and says so."""
    module = model(None)
    layer = module.model.layers[0]

    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(128, 192, device="meta", dtype=torch.bfloat16), requires_grad=False)
            self.bias = nn.Parameter(torch.empty(128, device="meta", dtype=torch.bfloat16), requires_grad=False)

        def forward(self, x: torch.Tensor, adapter_index: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, self.weight, self.bias)

    layer.mlp.down_proj = Biased()  # type: ignore[union-attr, assignment]
    compiled = sidestream.compile(module, CompileOptions(check_counts=False), text=False)
    assert {record.name: record.matches for record in compiled.records}["lift_bias"] == 1
    assert "aten.linear.default" not in compiled.records[-1].ops_after
    assert compiled.records[-1].ops_after["aten.add.Tensor"] == 1
    compiled = sidestream.compile(module, CompileOptions(check_counts=False, disable=("lift_bias",)), text=False)
    assert any("it has a bias" in reason for record in compiled.records for reason in record.rejected)
    assert compiled.records[-1].ops_after["aten.linear.default"] == 1


def test_shapes_are_read_off_any_spelling_of_names() -> None:
    ours = [
        f"model.layers.{layer}.{name}"
        for layer in range(2)
        for name in ("self_attn.q_proj.lora_a", "self_attn.q_proj.lora_b", "mlp.up_proj.weight")
    ]
    dynamo = [name.replace(".", "_").replace("layers_", "modules_layers_modules_") for name in ours]
    peft = [f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_A.default.weight" for layer in range(2)]
    assert model_shape(ours, True) == model_shape(dynamo, True)
    shape = model_shape(peft, False)
    assert shape is not None and (shape.layers, shape.lora_linears, shape.packed_lora) == (2, 2, 2)
    assert model_shape(["weight", "bias"], False) is None


def test_int8_rotates_what_norms_and_silu_make_and_the_weights_with_it() -> None:
    """Attention's output is left as it is; switched off, so is everything."""
    for rotate in (True, False):
        compiled = sidestream.compile(model(), CompileOptions(precision="int8", rotate_activations=rotate), text=False)
        forms = {
            node.target.name().split("::")[1]: node.args[-2:]
            for node in compiled.graph_module.graph.nodes  # type: ignore[union-attr]
            if node.op == "call_function" and str(node.target).endswith(("_quant.default", "quantize_rowwise.default"))
        }
        norm, silu = (64, 128) if rotate else (0, 0)
        assert forms == {
            "rms_norm_quant": (torch.int8, norm),
            "add_rms_norm_quant": (torch.int8, norm),
            "silu_mul_quant": (torch.int8, silu),
            "paged_attention_quant": (torch.int8, 0),
            "quantize_rowwise": (torch.int8, norm),
        }
        weights = {name: str(recipe) for name, recipe in compiled.recipes.items() if "quantize(" in str(recipe)}
        for part, columns in (("down_proj", silu), ("o_proj", 0), ("gate_proj", norm)):
            found = [recipe for recipe in weights.values() if part in recipe]
            assert found and all(f"rotate={columns})" in recipe for recipe in found), found
