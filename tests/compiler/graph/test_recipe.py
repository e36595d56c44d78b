"""Recipes: what they compute, what they name, how they survive JSON."""

import json

import pytest
import torch
from sidestream.compiler.graph.materialize import materialize, quantize_weight
from sidestream.compiler.graph.recipe import (
    Recipe,
    RecipeError,
    Share,
    cast,
    cat,
    item,
    param,
    quantize,
    rounded,
    rounded_parts,
    scale,
    sliced,
    transpose,
    unsqueeze,
)
from sidestream.ops.elementwise.quantize import reference as quantize_rowwise_reference


def packed() -> Recipe:
    return cat(0, [param("q"), param("k"), param("v")])


def checkpoint(width: int = 32) -> dict[str, torch.Tensor]:
    return {name: torch.randn(rows, width, dtype=torch.bfloat16) for name, rows in (("q", 48), ("k", 16), ("v", 16))}


@pytest.mark.parametrize(
    "form", [(torch.float8_e4m3fn, 0), (torch.int8, 0), (torch.int8, 128)], ids=["e4m3", "int8", "rotated"]
)
@pytest.mark.parametrize("width", [32, 256, 40, 17])
def test_packs_and_quantizes_like_the_activation_op(width: int, form: tuple[torch.dtype, int]) -> None:
    tensors = checkpoint(width)
    weight = torch.cat([tensors["q"], tensors["k"], tensors["v"]])
    values = materialize(item(quantize(packed(), *form), 0), tensors.__getitem__)
    scales = materialize(item(quantize(packed(), *form), 1), tensors.__getitem__)
    expected_values, expected_scales = quantize_rowwise_reference(weight, *form)
    assert torch.equal(values.float(), expected_values.float())
    assert torch.equal(scales, expected_scales)
    assert values.dtype == form[0] and scales.shape == (80,)


def test_quantized_rows_are_independent_of_the_block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(37, 64)
    whole = quantize_weight(weight)
    monkeypatch.setattr("sidestream.compiler.graph.materialize.ROWS_AT_ONCE", 5)
    parts = quantize_weight(weight)
    assert torch.equal(whole[0].float(), parts[0].float()) and torch.equal(whole[1], parts[1])


def test_values_and_scales_share_one_quantization() -> None:
    tensors, reads, memo = checkpoint(), [], {}

    def lookup(name: str) -> torch.Tensor:
        reads.append(name)
        return tensors[name]

    materialize(item(quantize(packed()), 0), lookup, memo)
    materialize(item(quantize(packed()), 1), lookup, memo)
    assert reads == ["q", "k", "v"]


def test_adapter_stacks_are_built_from_one_adapter() -> None:
    a = {"q.lora_a": torch.randn(1, 4, 8), "k.lora_a": torch.randn(1, 4, 8)}
    recipe = scale(cat(1, [param("q.lora_a"), param("k.lora_a")]), 0.5)
    assert torch.allclose(materialize(recipe, a.__getitem__), torch.cat([a["q.lora_a"], a["k.lora_a"]], dim=1) * 0.5)


def test_shape_changes_and_casts() -> None:
    x = torch.randn(3, 5)
    recipe = cast(unsqueeze(transpose(param("x"), 0, 1), 0), torch.bfloat16)
    result = materialize(recipe, {"x": x}.__getitem__)
    assert result.is_contiguous() and torch.equal(result, x.t().unsqueeze(0).bfloat16())


def test_works_on_meta_tensors() -> None:
    result = materialize(item(quantize(param("x")), 0), lambda name: torch.empty(6, 4, device="meta"))
    assert result.device.type == "meta" and result.shape == (6, 4)


def test_survives_json_and_compares_by_content() -> None:
    recipe = item(quantize(cast(packed(), torch.float32)), 1)
    again = Recipe.from_json(json.loads(json.dumps(recipe.to_json())))
    assert again == recipe and hash(again) == hash(recipe)
    assert again != item(quantize(cast(packed(), torch.float32)), 0)
    assert recipe.sources() == {"q", "k", "v"}
    assert str(item(quantize(param("w"), torch.int8, 8), 0)) == "quantize(w, dtype=int8, rotate=8)[0]"


def test_a_single_part_is_not_concatenated() -> None:
    assert cat(0, [param("x")]) == param("x")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Recipe("stack", (param("x"),), {}), "unknown recipe op 'stack'"),
        (lambda: Recipe("cast", (), {"dtype": "float32"}), "needs 1 operands, got 0"),
        (lambda: Recipe("cat", (param("x"),), {}), "needs the attributes"),
        (lambda: item(param("x"), 0), "quantize recipe"),
        (lambda: item(quantize(param("x")), 2), "quantize recipe"),
        (lambda: Recipe.from_json({"op": "param"}), "not a recipe"),
    ],
)
def test_malformed_recipes_are_refused(make: object, says: str) -> None:
    with pytest.raises(RecipeError, match=says.replace("(", r"\(")):
        make()  # type: ignore[operator]


def test_says_what_is_missing_or_ambiguous() -> None:
    with pytest.raises(RecipeError, match="no tensor 'gone'"):
        materialize(param("gone"), {}.__getitem__)
    with pytest.raises(RecipeError, match="two outputs"):
        materialize(quantize(param("x")), lambda name: torch.randn(2, 2))
    with pytest.raises(RecipeError, match="both outputs"):
        materialize(cast(quantize(param("x")), torch.float32), lambda name: torch.randn(2, 2))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_has_its_part_of_rounded_weights(rank: int) -> None:
    """Its rows and their scales, the last ones filled up with zeros; or its columns, and the scales of whole rows."""
    weights = checkpoint()
    held = {f"{name}.rounded": torch.randint(-127, 127, each.shape, dtype=torch.int8) for name, each in weights.items()}
    held |= {f"{name}.rounded_scale": torch.rand(len(each)) for name, each in weights.items()}

    def part(recipe: Recipe) -> list[torch.Tensor]:
        both = [rounded(quantize(recipe, torch.int8), index) for index in (0, 1)]
        assert [str(each.args[0]) for each in rounded_parts(both[0])] == whole
        return [materialize(each, held.__getitem__) for each in both]

    whole = [f"quantize({name}, dtype=int8, rotate=0)" for name in "qkv"]
    shares = {"q": slice(24 * rank, 24 * rank + 24), "k": slice(8 * rank, 8 * rank + 8), "v": slice(0, 16)}
    rows = [sliced(param("q"), 0, Share(rank, 2), 48), sliced(param("k"), 0, Share(rank, 2), 16), param("v")]
    values, scales = part(cat(0, rows))
    assert torch.equal(values, torch.cat([held[f"{name}.rounded"][share] for name, share in shares.items()]))
    assert torch.equal(scales, torch.cat([held[f"{name}.rounded_scale"][share] for name, share in shares.items()]))
    whole = [f"quantize(scale({whole_name}, factor=2.0), dtype=int8, rotate=0)" for whole_name in "q"]
    values, scales = part(sliced(scale(param("q"), 2.0), 1, Share(rank, 2), 32))
    assert torch.equal(values, held["q.rounded"][:, 16 * rank : 16 * rank + 16])
    assert torch.equal(scales, held["q.rounded_scale"])
    whole = ["quantize(k, dtype=int8, rotate=0)"]
    values, scales = part(sliced(param("k"), 0, Share(rank, 2, 12), 16))
    kept = (12, 4)[rank]
    assert torch.equal(values[:kept], held["k.rounded"][12 * rank :][:12]) and not values[kept:].any()
    assert torch.equal(scales[:kept], held["k.rounded_scale"][12 * rank :][:12]) and not scales[kept:].any()
    assert len(values) == len(scales) == 12
