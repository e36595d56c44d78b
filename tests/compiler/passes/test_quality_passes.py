"""Centred keys, Hadamard by layer, rotated values: exact in exact arithmetic, and worth it where there are outliers."""

from pathlib import Path
from typing import Any

import pytest
import sidestream
import torch
from sidestream.compiler.api import CompiledModel
from sidestream.compiler.graph.materialize import materialize
from sidestream.compiler.graph.recipe import Recipe, RecipeError, calibrated, hadamard, param
from sidestream.compiler.options import CompileOptions, OptionError
from sidestream.compiler.passes.quantize.center_keys import key_center_name
from sidestream.compiler.program.program import Bucket, Program
from sidestream.graphs.llama import Llama
from sidestream.ops.elementwise.hadamard import hadamard as hadamard_op
from sidestream.runtime.quantization.kv_error import attention_weights, score_variance, stored, value_error
from support.compiled import CompiledRunner
from support.paged import Chunk, PagedRunner, plain_model
from support.tiny import AdapterSpec, TinyBase, tiny_adapters, tiny_llama

ROUNDS = [
    [Chunk(0, list(range(3, 33)), -1), Chunk(1, [7, 200, 31, 99, 4], 0), Chunk(2, list(range(150, 130, -1)), 1)],
    [Chunk(0, [9, 8, 7], -1), Chunk(1, [42], 0), Chunk(2, [1], 1)],
]
SPECS = [
    AdapterSpec(rank=4),
    AdapterSpec(rank=20, targets=("v_proj", "o_proj")),
    AdapterSpec(rank=8, targets=("q_proj", "down_proj")),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TinyBase:
    return tiny_llama(tmp_path_factory.mktemp("quality"))


@pytest.fixture(scope="module")
def adapters(base: TinyBase) -> list[Path]:
    return tiny_adapters(base, SPECS)


def run(model: Llama, options: CompileOptions | None) -> torch.Tensor:
    """Logits of both rounds; sequences whose adapter the model has no slot for run the base."""
    torch.manual_seed(0)
    slots = 0 if model.lora is None else model.lora.slots
    runner = PagedRunner(model, 3, fill=0.0) if options is None else CompiledRunner(model, options, 3, fill=0.0)
    rounds = [[Chunk(each.sequence, each.tokens, min(each.adapter, slots - 1)) for each in chunks] for chunks in ROUNDS]
    return torch.cat([part for chunks in rounds for part in runner.step(chunks)])


def record(compiled: CompiledModel, name: str) -> Any:
    return next(each for each in compiled.records if each.name == name)


def give_centers(model: Llama, size: float) -> None:
    """Constants where a calibration would put them."""
    for layer in model.model.layers:
        shape = model.config.num_key_value_heads, model.config.head_dim
        layer.self_attn.register_buffer("key_center", size * torch.randn(shape))  # type: ignore[union-attr]


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_rotated_values_change_nothing_in_exact_arithmetic(base: TinyBase, adapters: list[Path], count: int) -> None:
    model, _ = plain_model(base, adapters[:count])
    plain = run(model, None)
    for options in ({}, {"disable": ("pack_projections", "fuse_rope_append")}):
        rotated = run(model, CompileOptions(precision="fp32", rotate_values=True, **options))
        assert torch.allclose(rotated, plain, atol=1e-4, rtol=1e-4), (rotated - plain).abs().max()


def test_rotation_reaches_packed_weights_and_stacks(base: TinyBase, adapters: list[Path]) -> None:
    model, _ = plain_model(base, adapters[:2])
    compiled = sidestream.compile(model, CompileOptions(precision="fp32", rotate_values=(1,)), text=False)
    assert record(compiled, "rotate_values").matches == 1
    rotated = {
        str(recipe) for recipe in (compiled.recipes | compiled.adapter_recipes).values() if "hadamard" in str(recipe)
    }
    assert len(rotated) == 4 and all("layers.1.self_attn" in recipe and "layers.0" not in recipe for recipe in rotated)
    assert {
        name
        for name in ("v_proj", "o_proj")
        for recipe in rotated
        if f"hadamard(model.layers.1.self_attn.{name}" in recipe
    } == {"v_proj", "o_proj"}


def test_without_lifted_lora_values_are_not_rotated(base: TinyBase, adapters: list[Path]) -> None:
    model, _ = plain_model(base, adapters[:1])
    report = record(
        sidestream.compile(model, CompileOptions(precision="fp32", rotate_values=True, disable=("lift_lora",))),
        "rotate_values",
    )
    assert report.matches == 0 and len(report.rejected) == 2 and "is lift_lora or lift_bias off?" in report.rejected[0]
    assert torch.allclose(
        run(model, CompileOptions(precision="fp32", rotate_values=True, disable=("lift_lora",))),
        run(model, None),
        atol=1e-4,
        rtol=1e-4,
    )


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "int8"])
@pytest.mark.parametrize("transform", [True, False])
def test_any_center_leaves_the_answer_alone(
    base: TinyBase, adapters: list[Path], kv_dtype: Any, transform: bool
) -> None:
    """Nothing but the cache is quantized, so what differs is its error."""
    model, _ = plain_model(base, adapters[:2])
    give_centers(model, 0.3)
    options = {"precision": "fp8", "kv_dtype": kv_dtype, "hadamard": transform, "disable": ("quantize_linears",)}
    plain = run(model, None)
    errors = [
        (run(model, CompileOptions(**options, center_keys=centers)) - plain).norm() / plain.norm()
        for centers in (False, True)
    ]
    assert 0 < errors[1] < 3 * errors[0] + 1e-3 and errors[1] < 0.1, errors


def test_a_center_rescues_keys_with_a_bias(base: TinyBase) -> None:
    """All keys of a head share a large constant, as a bias would make them: centred, the cache's error is that of
    keys without it.
    """
    torch.manual_seed(1)
    k, q, bias = torch.randn(96, 2, 64), torch.randn(96, 8, 64), 30 * torch.randn(2, 64)
    for kv_dtype in ("fp8_e4m3", "int8"):
        without, biased, centered = (
            score_variance(q, keys, 0.125, kv_dtype, center=center)
            for keys, center in ((k, None), (k + bias, None), (k + bias, bias))
        )
        assert biased > 30 * without and centered == pytest.approx(without, rel=0.01)
        mean = score_variance(q, k + bias, 0.125, kv_dtype, hadamard=True, center=(k + bias).mean(0))
        assert mean < 1.5 * score_variance(q, k, 0.125, kv_dtype, hadamard=True)


def test_int8_with_hadamard_has_a_quarter_of_the_score_error_of_e4m3() -> None:
    """Same bytes: on Gaussian keys with outlier channels, as Llamas have them."""
    torch.manual_seed(2)
    q, k = torch.randn(128, 8, 128), torch.randn(128, 2, 128)
    k[..., [5, 77]] *= 12
    q[..., [5, 77]] *= 0.3
    error = {
        (kv_dtype, transform): score_variance(q, k, 128**-0.5, kv_dtype, hadamard=transform) ** 0.5
        for kv_dtype in ("fp8_e4m3", "int8")
        for transform in (False, True)
    }
    assert 3 < error["fp8_e4m3", True] / error["int8", True] < 7, error
    assert error["int8", False] > 2 * error["int8", True], error


def test_rotation_spreads_outliers_of_values() -> None:
    torch.manual_seed(3)
    q, k, v = torch.randn(96, 4, 64), torch.randn(96, 2, 64), torch.randn(96, 2, 64)
    weights = attention_weights(q, k, 0.125)
    flat = value_error(v, weights, "int8")
    v[..., 9] *= 40
    plain, rotated = (value_error(v, weights, "int8", rotated=each) for each in (False, True))
    assert plain[1] == rotated[1] and rotated[0] < 0.5 * plain[0] and flat[0] < plain[0]
    assert (stored(v, "int8")[..., :9] - v[..., :9]).norm() > 1.4 * (
        hadamard_op(stored(hadamard_op(v), "int8"))[..., :9] - v[..., :9]
    ).norm()


def test_hadamard_by_layer(base: TinyBase) -> None:
    model, _ = plain_model(base)
    compiled = sidestream.compile(
        model, CompileOptions(hadamard=(1,), center_keys=[0, 1], balance_keys=False), text=False
    )
    appends = [
        node for node in compiled.graph_module.graph.nodes if node.target is torch.ops.sidestream.rope_append.default
    ]
    assert [node.args[9] for node in appends] == [False, True]
    recipes = [str(compiled.recipes[node.args[10].name]) for node in appends]
    assert recipes == [key_center_name(0), f"hadamard({key_center_name(1)}, dim=1, width=64)"]
    assert [
        each.matches for each in compiled.records if each.name in ("quantize_kv", "center_keys", "fuse_rope_append")
    ] == [2, 2, 2]


def test_unquantized_caches_are_not_centered(base: TinyBase) -> None:
    model, _ = plain_model(base)
    report = record(sidestream.compile(model, CompileOptions(precision="bf16", center_keys=True)), "center_keys")
    assert report.matches == 0 and "is not quantized: there is nothing to gain" in report.rejected[0]


def test_a_program_with_centers_is_saved_and_loaded(base: TinyBase) -> None:
    model, _ = plain_model(base)
    program = sidestream.compile(model, CompileOptions(center_keys=(0,), rotate_values=True)).program(
        Bucket(4, 4, 3, 2, True, False)
    )
    again = Program.decoded(program.encoded())
    recipe = again.recipes["key_center_0"]  # scaled as the keys are, and then rotated
    assert again == program and recipe.op == "hadamard" and recipe.args[0].op == "multiply"
    assert recipe.args[0].args[0] == calibrated(key_center_name(0), (2, 64))
    assert again.by_name["key_center_0"].dtype == torch.float32 and any(
        buffer.name == "key_center_0" for buffer in again.of_kind("weight")
    )


def test_recipes_of_constants_and_rotations() -> None:
    weight = torch.randn(12, 5)
    rotated = materialize(hadamard(param("w"), 0, 4), {"w": weight}.__getitem__)
    assert torch.allclose(rotated[4:8], hadamard_op(weight[4:8].T.contiguous()).T, atol=1e-6)
    assert torch.allclose(
        materialize(hadamard(hadamard(param("w"), 0, 4), 0, 4), {"w": weight}.__getitem__), weight, atol=1e-6
    )
    assert (
        materialize(hadamard(param("w"), 1, 8), {"w": torch.randn(3, 16).bfloat16()}.__getitem__).dtype
        == torch.bfloat16
    )
    leaf = calibrated("c", (2, 4))
    assert (
        torch.equal(materialize(leaf, {}.__getitem__), torch.zeros(2, 4))
        and leaf.sources() == {"c"}
        and Recipe.from_json(leaf.to_json()) == leaf
    )
    with pytest.raises(RecipeError, match="calibration is of another model"):
        materialize(leaf, {"c": torch.zeros(3, 4)}.__getitem__)


@pytest.mark.parametrize("value", ["on", (1, -2), (True,), 3, (0.5,)])
def test_layers_are_true_false_or_numbers(value: Any) -> None:
    with pytest.raises(OptionError, match="numbers of layers"):
        CompileOptions(hadamard=value)
    assert CompileOptions(center_keys=[3, 1, 3]).center_keys == (1, 3)
