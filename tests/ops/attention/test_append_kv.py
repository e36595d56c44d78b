"""`append_kv`: what is stored can be read back; padding and other slots stay untouched."""

import pytest
import torch
from sidestream.ops.attention.append_kv import append_kv
from sidestream.ops.core.kv_layout import PAGE_SIZE, kv_cache_shape, kv_scales_shape
from support.checks import check_kernel, poison, stored_tolerances
from support.samples import normal
from support.sm90 import launched

FP8 = torch.float8_e4m3fn
CACHES = [torch.bfloat16, FP8, torch.int8]
ERROR = {torch.bfloat16: 0.0, FP8: 2.0**-4, torch.int8: 0.5 / 127}  # of a value (e4m3), of the row's maximum (int8)


def cache_of(
    pages: int, heads: int, width: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A cache full of rubbish: only the named slots may change."""
    cache = torch.empty(kv_cache_shape(pages, heads, width), dtype=dtype, device=device)
    scales = torch.randn(kv_scales_shape(pages, heads), device=device) if dtype != torch.bfloat16 else None
    return poison(cache) if dtype != torch.bfloat16 else cache.normal_(), scales


def slots_of(tokens: int, pages: int, device: str = "cpu") -> torch.Tensor:
    slots = torch.randperm(pages * PAGE_SIZE, device=device)[:tokens].to(torch.int32)
    slots[1::3] = -1
    return slots


@pytest.mark.parametrize("dtype", CACHES)
def test_reference_stores_what_can_be_read_back(dtype: torch.dtype) -> None:
    k, v = normal(5, 2, 16), normal(5, 2, 16)
    cache, scales = cache_of(3, 2, 16, dtype)
    before, slots = cache.clone(), slots_of(5, 3)
    append_kv(k, v, cache, scales, slots)
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        page, offset = divmod(slot, PAGE_SIZE)
        for which, heads in enumerate((k, v)):
            stored = cache[page, :, which, offset].float()
            if scales is not None:
                stored = stored * scales[page, :, which, offset].unsqueeze(-1)
            row = heads[token].float()
            room = row.abs() * ERROR[dtype] if dtype == FP8 else row.abs().amax(-1, keepdim=True) * ERROR[dtype]
            assert (
                (stored - row).abs()
                <= room * 1.001 + 1e-6 * row.abs().amax() + (2.0**-10 * row.abs().amax() / 448 if dtype == FP8 else 0)
            ).all()
        cache[page, :, :, offset] = before[page, :, :, offset]
    assert torch.equal(cache.view(torch.uint8), before.view(torch.uint8))  # nothing else was written


def test_int8_rounds_half_to_even_and_never_stores_minus_128() -> None:
    k = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -127.0, 3.0] * 2).view(1, 1, 16)
    cache, scales = cache_of(1, 1, 16, torch.int8)
    append_kv(k, k, cache, scales, torch.tensor([3], dtype=torch.int32))
    assert cache[0, 0, 0, 3, :8].tolist() == [127, 0, 2, 2, 0, -2, -127, 3]


def test_scales_must_match_the_cache() -> None:
    cache, scales = cache_of(1, 1, 16, torch.int8)
    with pytest.raises(ValueError, match="int8 KV cache needs kv_scales"):
        append_kv(normal(1, 1, 16), normal(1, 1, 16), cache, None, slots_of(1, 1))
    with pytest.raises(ValueError, match="bfloat16 KV cache needs no kv_scales"):
        append_kv(normal(1, 1, 16), normal(1, 1, 16), cache.bfloat16(), scales, slots_of(1, 1))


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize(("heads", "width"), [(1, 64), (6, 32)])
def test_kernel(dtype: torch.dtype, heads: int, width: int) -> None:
    k, v = normal(5, heads, width), normal(5, heads, width)
    for center in ((), (2 * torch.randn(heads, width),)):
        check_kernel(
            append_kv,
            k,
            v,
            *cache_of(2, heads, width, dtype),
            slots_of(5, 2),
            *center,
            tolerances=stored_tolerances(dtype, 5, 2),
        )


@pytest.mark.interpret
def test_kernel_on_views_of_a_packed_row() -> None:
    packed = normal(5, 8, 32)
    check_kernel(
        append_kv,
        packed[:, 4:6],
        packed[:, 6:],
        *cache_of(2, 2, 32, FP8),
        slots_of(5, 2),
        tolerances=stored_tolerances(FP8, 5, 2),
    )


@pytest.mark.interpret
def test_kernel_rounds_int8_half_to_even() -> None:
    k = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -127.0, 3.0] * 2).view(1, 1, 16)
    cache, scales = cache_of(1, 1, 16, torch.int8)
    append_kv.launch(k, k, cache, scales, torch.tensor([3], dtype=torch.int32), out=())
    assert cache[0, 0, 0, 3, :8].tolist() == [127, 0, 2, 2, 0, -2, -127, 3]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize("tokens", [1, 3, 64, 200, 2048])
def test_kernel_on_the_gpu(dtype: torch.dtype, tokens: int) -> None:
    packed = torch.randn(tokens, 48, 128, device="cuda", dtype=torch.bfloat16)
    cache = cache_of(40, 8, 128, dtype, "cuda")
    for center in ((), (torch.randn(8, 128, device="cuda"),)):
        args = (packed[:, 32:40], packed[:, 40:], *cache, slots_of(tokens, 40, "cuda"), *center)
        check_kernel(append_kv, *args, tolerances=stored_tolerances(dtype, tokens, 40), pdl=True)


@pytest.mark.machine_code
@pytest.mark.parametrize("dtype", CACHES)
def test_machine_code(dtype: torch.dtype) -> None:
    cache, scales = (
        torch.empty(kv_cache_shape(9, 8, 128), dtype=dtype, device="meta"),
        torch.empty(kv_scales_shape(9, 8), device="meta"),
    )
    k = torch.empty(64, 48, 128, device="meta", dtype=torch.bfloat16)[:, 32:40]
    slots = torch.empty(64, device="meta", dtype=torch.int32)
    for center in ((), (torch.empty(8, 128, device="meta"),)):
        (code,) = launched(
            append_kv, k, k, cache, None if dtype == torch.bfloat16 else scales, slots, *center, pdl=True
        )
        assert code.spills == 0 and code.ptx_count("griddepcontrol.wait") == 1
