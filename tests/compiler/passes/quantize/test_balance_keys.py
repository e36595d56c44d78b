"""Balanced keys: what is massive in K alone costs a quantized cache nothing, and no score changes."""

import copy
from pathlib import Path
from typing import Any

import pytest
import sidestream
import torch
from sidestream.compiler.graph.materialize import materialize
from sidestream.compiler.graph.recipe import key_balance, param
from sidestream.compiler.options import CompileOptions
from sidestream.graphs.llama import Llama
from support.compiled import CompiledRunner
from support.paged import Chunk, PagedRunner, plain_model
from support.tiny import AdapterSpec, TinyBase, tiny_adapters, tiny_llama

ROUNDS = [
    [Chunk(0, list(range(3, 43)), -1), Chunk(1, [7, 200, 31, 99, 4], 0)],
    [Chunk(0, [9, 8, 7], -1), Chunk(1, [42], 0)],
]
ONLY_THE_CACHE: dict[str, Any] = {"precision": "fp8", "disable": ("quantize_linears",)}  # nothing else is quantized


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TinyBase:
    return tiny_llama(tmp_path_factory.mktemp("balance"))


@pytest.fixture(scope="module")
def adapters(base: TinyBase) -> list[Path]:
    return tiny_adapters(base, [AdapterSpec(rank=8, targets=("q_proj", "k_proj", "down_proj"))])


def logits(model: Llama, **options: Any) -> torch.Tensor:
    runner = (
        CompiledRunner(model, CompileOptions(**options), 3, fill=0.0) if options else PagedRunner(model, 3, fill=0.0)
    )
    return torch.cat([part for chunks in ROUNDS for part in runner.step(chunks)])


def massive_keys(model: Llama, power: int = 5) -> Llama:
    """The same model with one RoPE pair of every KV head 2^power larger in K and smaller in Q, adapters included:
    the same scores, exactly.
    """
    changed, config = copy.deepcopy(model), model.config
    dim = config.head_dim
    pair = torch.tensor([dim // 2 - 1, dim - 1])
    for layer in changed.model.layers:
        attention: Any = layer.self_attn
        for linear, factor in ((attention.k_proj, 2.0**power), (attention.q_proj, 2.0**-power)):
            heads = linear.weight.shape[0] // dim
            rows = (torch.arange(heads)[:, None] * dim + pair).flatten()
            linear.weight.data[rows] *= factor
            if linear.has_lora:
                linear.lora_b.data[:, rows] *= factor
    return changed


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize("transform", [True, False])
def test_keys_that_are_massive_cost_nothing(
    base: TinyBase, adapters: list[Path], kv_dtype: str, transform: bool
) -> None:
    model, _ = plain_model(base, adapters)
    model = massive_keys(model, 0)  # a copy
    massive = massive_keys(model)
    exact = logits(model)
    torch.testing.assert_close(logits(massive), exact, rtol=1e-3, atol=1e-3)

    def error(which: Llama, balance: bool) -> float:
        found = logits(which, **ONLY_THE_CACHE, kv_dtype=kv_dtype, hadamard=transform, balance_keys=balance)
        return float((found - exact).norm() / exact.norm())

    usual = error(model, True)
    assert 0 < error(massive, True) < 1.3 * usual + 1e-3, usual
    if kv_dtype == "int8" or transform:  # e4m3 has an exponent of its own for each channel, unless they are mixed
        assert error(massive, False) > 2 * usual


def test_a_center_is_scaled_along(base: TinyBase) -> None:
    model, _ = plain_model(base)
    massive = massive_keys(model, 3)
    torch.manual_seed(5)
    for layer in massive.model.layers:
        layer.self_attn.register_buffer(
            "key_center", 0.3 * torch.randn(model.config.num_key_value_heads, model.config.head_dim)
        )  # type: ignore[union-attr]
    exact = logits(massive)
    errors = [
        float((logits(massive, **ONLY_THE_CACHE, kv_dtype="int8", center_keys=centers) - exact).norm() / exact.norm())
        for centers in (False, True)
    ]
    assert 0 < errors[1] < 3 * errors[0] + 1e-3, errors


def test_which_layers_and_what_is_refused(base: TinyBase) -> None:
    model, _ = plain_model(base)

    def found(**options: Any) -> tuple[int, list[str], list[str]]:
        compiled = sidestream.compile(model, CompileOptions(**options), text=False)
        record = next(each for each in compiled.records if each.name == "balance_keys")
        return (
            record.matches,
            record.rejected,
            sorted(name for name in compiled.recipes if name.startswith("key_balance")),
        )

    assert found() == (2, [], ["key_balance_0", "key_balance_1"])
    assert found(balance_keys=(1,)) == (1, [], ["key_balance_1"])
    assert found(balance_keys=False)[0] == 0
    matches, rejected, names = found(kv_dtype="bf16")
    assert (matches, names) == (0, []) and len(rejected) == 2 and "is not quantized" in rejected[0]
    matches, rejected, names = found(disable=("lift_rms_norm",), check_counts=False)
    assert (matches, names) == (0, []) and "does not follow a norm" in rejected[0]


def test_factors() -> None:
    """One KV head with two query heads, head_dim 4: pairs are (0, 2) and (1, 3)."""
    query, key, gain = torch.zeros(8, 2), torch.zeros(4, 2), torch.tensor([2.0, 1.0])
    query[[0, 2, 4, 6], 0] = 16.0  # 32 after the gain
    key[[0, 2], 1] = 2.0
    state = {"q": query, "k": key, "g": gain}
    recipe = key_balance(param("q"), param("k"), param("g"), 1, 4)
    assert materialize(recipe, state.__getitem__).tolist() == [[4.0, 1.0]]  # sqrt(32 / 2); a pair of zeros stays
    state["k"] = key * 1e-12
    assert materialize(recipe, state.__getitem__).tolist() == [[2.0**16, 1.0]]
