"""`rope_append`: the fused op is its parts in a row, and its kernel is the fused op."""

from typing import Any

import pytest
import torch
from sidestream.ops.attention.append_kv import append_kv
from sidestream.ops.attention.rope import rope
from sidestream.ops.attention.rope_append import rope_append
from sidestream.ops.core.kv_layout import kv_cache_shape, kv_scales_shape
from sidestream.ops.elementwise.hadamard import hadamard
from support.checks import Tolerance, check_kernel, poison, stored_tolerances
from support.samples import angles, normal
from support.sm90 import launched

FP8 = torch.float8_e4m3fn
CACHES = [torch.bfloat16, FP8, torch.int8]


def arguments(
    tokens: int,
    heads: int,
    kv_heads: int,
    width: int,
    cache: torch.dtype,
    delta: bool,
    fht: bool,
    device: str = "cpu",
    center: bool = False,
    balance: bool = False,
) -> tuple[Any, ...]:
    row = (heads + 2 * kv_heads) * width
    pages = tokens // 64 + 2
    slots = torch.randperm(pages * 64)[:tokens].to(torch.int32)
    slots[1::3] = -1
    made = (
        normal(tokens, row),
        normal(tokens, row) if delta else None,
        *angles(tokens, width),
        poison(torch.empty(kv_cache_shape(pages, kv_heads, width), dtype=cache)),
        None if cache == torch.bfloat16 else torch.randn(kv_scales_shape(pages, kv_heads)),
        slots,
    )
    key_center = (3 * torch.randn(kv_heads, width)).to(device) if center else None
    key_balance = torch.rand(kv_heads, width // 2).add(0.1).to(device) if balance else None
    more = (key_center, key_balance) if balance else (key_center,) if center else ()
    return (*(part if part is None else part.to(device) for part in made), heads, kv_heads, fht, *more)


def check(args: tuple[Any, ...], **options: Any) -> None:
    cache = args[4]
    stored = stored_tolerances(cache.dtype, args[0].shape[0], cache.shape[0])
    # values of up to 40 nearly cancel in a few sums, in the kernel's own order
    check_kernel(rope_append, *args, tolerances={0: Tolerance(2.0**-7, 1e-5, differing=0.01), **stored}, **options)


@pytest.mark.parametrize("fht", [False, True])
def test_reference_is_its_parts_in_a_row(fht: bool) -> None:
    qkv, delta, cos, sin, cache, scales, slots, heads, kv_heads, _ = arguments(5, 4, 2, 16, FP8, True, fht)
    cache, scales = torch.zeros_like(cache), torch.zeros_like(scales)
    q = rope_append(qkv, delta, cos, sin, cache, scales, slots, heads, kv_heads, fht)
    total = (qkv.float() + delta.float()).view(5, 8, 16)
    turned = rope(total[:, :6], cos, sin)
    turned = hadamard(turned) if fht else turned
    expected, expected_scales = torch.zeros_like(cache), torch.zeros_like(scales)
    append_kv(turned[:, 4:], total[:, 6:], expected, expected_scales, slots)
    assert torch.equal(q, turned[:, :4].bfloat16())
    assert torch.equal(cache.view(torch.uint8), expected.view(torch.uint8)) and torch.equal(scales, expected_scales)


@pytest.mark.parametrize("cache", CACHES)
def test_a_center_is_subtracted_from_the_stored_keys_only(cache: torch.dtype) -> None:
    *args, center = arguments(5, 4, 2, 16, cache, True, True, center=True)
    qkv, delta, cos, sin, stored, scales, slots, heads, kv_heads, _ = args
    stored, scales = torch.zeros_like(stored), None if scales is None else torch.zeros_like(scales)
    q = rope_append(qkv, delta, cos, sin, stored, scales, slots, heads, kv_heads, True, center)
    total = (qkv.float() + delta.float()).view(5, 8, 16)
    turned = hadamard(rope(total[:, :6], cos, sin))
    expected, expected_scales = torch.zeros_like(stored), None if scales is None else torch.zeros_like(scales)
    append_kv(turned[:, 4:] - center, total[:, 6:], expected, expected_scales, slots)
    again, again_scales = torch.zeros_like(stored), None if scales is None else torch.zeros_like(scales)
    append_kv(turned[:, 4:], total[:, 6:], again, again_scales, slots, center)
    assert torch.equal(q, turned[:, :4].bfloat16())
    assert torch.equal(stored.view(torch.uint8), expected.view(torch.uint8)) and torch.equal(
        again.view(torch.uint8), expected.view(torch.uint8)
    )
    assert scales is None or (torch.equal(scales, expected_scales) and torch.equal(again_scales, expected_scales))


def of_family(args: tuple[Any, ...], bias: bool = True, norm: bool = True, rotates: bool = True) -> tuple[Any, ...]:
    """The same with a bias, norms of q's and k's heads, or without RoPE."""
    qkv, width = args[0], args[4].shape[-1]
    row = (5 * torch.randn(qkv.shape[1])).to(qkv.dtype).to(qkv.device) if bias else None
    gains = (torch.rand(2, width) + 0.5).to(qkv.dtype).to(qkv.device) if norm else None
    angles_or_none = args[2:4] if rotates else (None, None)
    known = (*args[:2], *angles_or_none, *args[4:], *[None] * (12 - len(args)))
    return (*known, row, gains, 1e-6)


@pytest.mark.parametrize("rotates", [False, True])
def test_bias_and_head_norm_are_their_parts_in_a_row(rotates: bool) -> None:
    args = of_family(arguments(5, 4, 2, 16, torch.bfloat16, True, False), rotates=rotates)
    qkv, delta, cos, sin, cache, _, slots = args[:7]
    bias, gains, eps = args[12:]
    q = rope_append(qkv, delta, cos, sin, torch.zeros_like(cache), None, slots, *args[7:])
    heads = (qkv.float() + bias.float() + delta.float()).view(5, 8, 16)[:, :4]
    normed = torch.nn.functional.rms_norm(heads, (16,), gains[0].float(), eps)
    torch.testing.assert_close(q, (rope(normed, cos, sin) if rotates else normed).bfloat16(), rtol=2**-7, atol=1e-6)


def test_biases_and_norms_that_do_not_fit_are_refused() -> None:
    args = of_family(arguments(2, 4, 2, 16, FP8, False, False))
    for place, wrong, named in ((12, torch.ones(16), "bias"), (13, torch.ones(16), "head_norm"), (2, None, "neither")):
        bad = (*args[:place], wrong, *args[place + 1 :])
        with pytest.raises(ValueError, match=named):
            rope_append(*bad)
        with pytest.raises(ValueError, match=named):
            rope_append.launch(*bad, out=(torch.empty(2, 4, 16),))


@pytest.mark.parametrize("fht", [False, True])
def test_balancing_moves_size_from_keys_to_queries_and_leaves_every_score(fht: bool) -> None:
    qkv, _, cos, sin, cache, _, slots, heads, kv_heads, _, _, balance = arguments(
        5, 4, 2, 16, torch.float32, False, fht, balance=True
    )
    slots = torch.arange(5, dtype=torch.int32)
    caches = [torch.zeros_like(cache), torch.zeros_like(cache)]
    plain = rope_append(qkv.float(), None, cos, sin, caches[0], None, slots, heads, kv_heads, fht)
    moved = rope_append(qkv.float(), None, cos, sin, caches[1], None, slots, heads, kv_heads, fht, None, balance)
    plain_keys, moved_keys = (one[0, :, 0, :5] for one in caches)  # [kv heads, tokens, channels]
    expected = torch.einsum("thd,hsd->hts", plain, plain_keys.repeat_interleave(2, 0))
    torch.testing.assert_close(
        torch.einsum("thd,hsd->hts", moved, moved_keys.repeat_interleave(2, 0)), expected, rtol=1e-4, atol=1e-4
    )
    assert not torch.allclose(moved_keys, plain_keys, rtol=0.05)
    if not fht:
        torch.testing.assert_close(moved_keys, plain_keys * torch.cat((balance, balance), 1)[:, None, :])
    assert torch.equal(caches[0][:, :, 1], caches[1][:, :, 1])  # values stay


def test_balances_that_do_not_fit_are_refused() -> None:
    args = arguments(2, 4, 2, 16, FP8, False, False)
    for wrong in (torch.ones(4, 8), torch.ones(2, 16), torch.ones(2, 8, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match=r"key_balance must be fp32 \[2, 8\]"):
            rope_append(*args, None, wrong)
        with pytest.raises(ValueError, match=r"key_balance must be fp32 \[2, 8\]"):
            rope_append.launch(*args, None, wrong, out=(torch.empty(2, 4, 16),))


def test_a_center_of_another_shape_is_refused() -> None:
    args = arguments(2, 4, 2, 16, FP8, False, False)
    for wrong in (torch.zeros(4, 16), torch.zeros(2, 16, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match=r"key_center must be fp32 \[2, 16\]"):
            rope_append(*args, wrong)
        with pytest.raises(ValueError, match=r"key_center must be fp32 \[2, 16\]"):
            rope_append.launch(*args, wrong, out=(torch.empty(2, 4, 16),))


@pytest.mark.interpret
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 2, 64), (5, 1, 128), (3, 3, 32)])
def test_kernel(cache: torch.dtype, heads: int, kv_heads: int, width: int, pytestconfig: pytest.Config) -> None:
    """Half of the combinations, in turns, so that each cache and each width meets all; with --exhaustive all."""
    parts = ((False, True, False), (True, False, False), (True, True, True), (False, False, True))
    turn = (CACHES.index(cache) + heads) % 2
    for delta, fht, center in parts if pytestconfig.getoption("--exhaustive") else parts[turn::2]:
        check(arguments(3, heads, kv_heads, width, cache, delta, fht, center=center, balance=delta))


@pytest.mark.interpret
@pytest.mark.parametrize(("bias", "norm", "rotates"), [(True, False, True), (False, True, True), (True, True, False)])
def test_kernel_of_each_family(bias: bool, norm: bool, rotates: bool) -> None:
    check(of_family(arguments(3, 5, 1, 64, torch.int8, bias, True, center=True), bias, norm, rotates))


@pytest.mark.interpret
def test_kernel_in_fp32_mode() -> None:
    qkv, _, cos, sin, cache, _, slots, heads, kv_heads, _ = arguments(4, 4, 2, 32, torch.bfloat16, False, False)
    check_kernel(rope_append, qkv.float(), None, cos, sin, cache.float(), None, slots, heads, kv_heads, True)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 64, 200, 2048])
@pytest.mark.parametrize(
    ("cache", "delta", "fht"),
    [(FP8, True, False), (FP8, False, True), (torch.int8, True, True), (torch.bfloat16, False, False)],
)
def test_kernel_on_the_gpu(tokens: int, cache: torch.dtype, delta: bool, fht: bool) -> None:
    for center, balance in ((False, False), (True, False), (False, True), (True, True)):
        check(arguments(tokens, 32, 8, 128, cache, delta, fht, "cuda", center, balance), pdl=True)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 64, 600])
@pytest.mark.parametrize("heads", [(28, 4), (32, 8)])
@pytest.mark.parametrize(("bias", "norm", "rotates"), [(True, False, True), (False, True, True), (True, True, False)])
def test_kernel_of_each_family_on_the_gpu(
    tokens: int, heads: tuple[int, int], bias: bool, norm: bool, rotates: bool
) -> None:
    args = arguments(tokens, *heads, 128, torch.int8, True, True, "cuda", balance=True)
    check(of_family(args, bias, norm, rotates), pdl=True)


@pytest.mark.gpu
def test_kernel_on_the_gpu_with_heads_of_64() -> None:
    check(arguments(64, 24, 8, 64, FP8, True, True, "cuda", True))


@pytest.mark.machine_code
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize(("center", "balance"), [(False, False), (False, True), (True, True)])
def test_machine_code(cache: torch.dtype, width: int, center: bool, balance: bool) -> None:
    args = arguments(2, 32, 8, width, cache, True, True, "meta", center, balance)
    (code,) = launched(rope_append, *args, pdl=True)
    assert code.spills == 0 and code.registers <= 128 and code.ptx_count("griddepcontrol.wait") == 1


@pytest.mark.machine_code(each="norm")
@pytest.mark.parametrize(("bias", "norm"), [(True, False), (False, True), (True, True)])
def test_machine_code_of_each_family(bias: bool, norm: bool) -> None:
    args = of_family(arguments(2, 28, 4, 128, torch.int8, True, True, "meta", balance=True), bias, norm)
    (code,) = launched(rope_append, *args, pdl=True)
    assert code.spills == 0 and code.registers <= 128 and code.ptx_count("griddepcontrol.wait") == 1


def test_a_row_of_another_width_is_refused() -> None:
    args = arguments(2, 4, 2, 16, FP8, False, False)
    with pytest.raises(ValueError, match="rows of 128 are not 3"):
        rope_append.launch(*args[:7], 3, 2, False, out=(torch.empty(2, 3, 16),))
