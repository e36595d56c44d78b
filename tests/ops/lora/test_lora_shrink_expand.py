"""LoRA for mixed adapters: the semantic op against plain loops, its two kernels against their references."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from sidestream.ops.core.registry import OPS
from sidestream.ops.core.triton_support import INTERPRETED
from sidestream.ops.elementwise.quantize_blocks import dequantize_blocks, padded_scales
from sidestream.ops.elementwise.quantize_blocks import reference as quantize_blocks_reference
from sidestream.ops.lora.expand import lora_expand
from sidestream.ops.lora.expand import reference as lora_expand_reference
from sidestream.ops.lora.lora import lora
from sidestream.ops.lora.plan import lora_plan_fake, lora_splits, lora_tile
from sidestream.ops.lora.shrink import lora_shrink
from sidestream.ops.lora.shrink import reference as lora_shrink_reference
from support.checks import Tolerance, assert_near, check_kernel, poison
from support.lora import LoraCase, lora_case
from support.sm90 import MachineCode, launched

F32, BF16, FP8, INT8 = torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8
SHRINK = {0: Tolerance(1e-4, 1e-4)}
# the interpreter rounds fp32 to bf16 towards zero, also between the two products
EXPAND = {
    F32: {0: Tolerance(1e-5, 1e-5)},
    BF16: {0: Tolerance(2.0**-6, 0.05) if INTERPRETED else Tolerance(2.0**-7, 2e-3)},
}
LORA = {
    F32: {0: Tolerance(1e-4, 1e-4)},
    BF16: {0: Tolerance(2.0**-6, 0.05) if INTERPRETED else Tolerance(2.0**-6, 0.02)},
}


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_reference_against_loops(dtype: torch.dtype) -> None:
    case = lora_case(11, 96, 16, [40, 24, 8], slots=3, dtype=dtype)
    delta = lora(*case.lora)
    exact = torch.zeros(11, 72, dtype=torch.float64)
    for token, slot in enumerate(case.adapter_index.tolist()):
        if slot >= 0:
            shrunk = case.a[slot].double() @ case.x[token].double()
            parts = [shrunk[:16].repeat(40, 1), shrunk[16:32].repeat(24, 1), shrunk[32:].repeat(8, 1)]
            exact[token] = (case.b[slot].double() * torch.cat(parts)).sum(1)
    assert delta.dtype == dtype and (delta[case.adapter_index < 0] == 0).all()
    assert_near(delta.double(), exact, Tolerance(1e-5, 1e-5) if dtype == F32 else Tolerance(2.0**-6, 0.02))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("splits", [1, 3, 8])
def test_plan_shrink_expand_is_lora(dtype: torch.dtype, splits: int) -> None:
    case = lora_case(37, 1000, 32, [64, 33], dtype=dtype, tile=16, splits=splits)
    planes = lora_shrink(*case.shrink)
    assert planes.shape == (splits, 37, 64) and (planes[:, case.adapter_index < 0] == 0).all()
    assert_near(
        lora_expand(*case.expand(planes)),
        lora(*case.lora),
        Tolerance(1e-5, 1e-5) if dtype == F32 else Tolerance(2.0**-6, 0.02),
    )


@pytest.mark.parametrize("stored", [FP8, INT8])
@pytest.mark.parametrize("activations", [False, True])
def test_quantized_reference_is_the_dequantized_product(activations: bool, stored: torch.dtype) -> None:
    case = lora_case(11, 96, 16, [40, 24], slots=3).quantized(activations, stored)
    wide = [
        values.float() if scale is None else values.float() * scale[..., None]
        for values, scale in ((case.x, case.x_scale), (case.a, case.a_scale), (case.b, case.b_scale))
    ]
    delta = lora(*case.lora)
    assert delta.dtype == BF16 and lora.fake(*case.lora).dtype == BF16
    assert_near(delta.float(), lora(*wide, case.adapter_index, case.slices), Tolerance(2.0**-6, 0.02))


def test_a_token_does_not_see_its_neighbours() -> None:
    case = lora_case(20, 128, 16, [48])
    alone = lora(case.x[3:4], case.a, case.b, case.adapter_index[3:4], [48])
    assert_near(lora(*case.lora)[3:4], alone)


def by_block(case: LoraCase, stored: torch.dtype = INT8) -> LoraCase:
    """The same with quantized stacks, and with activations that have a scale for each token and 128 columns; some
    columns are much larger than others.
    """
    x = case.x.float() * torch.linspace(-2, 2, case.x.shape[1], device=case.x.device).exp2()
    q, scale = quantize_blocks_reference(x / x.square().mean().sqrt(), stored)
    return replace(case.quantized(False, stored), x=q, x_scale=scale)


@pytest.mark.parametrize("stored", [FP8, INT8])
def test_reference_with_scales_by_block_is_the_dequantized_product(stored: torch.dtype) -> None:
    case = by_block(lora_case(17, 384, 16, [40], tile=16, splits=2), stored)
    assert case.x_scale is not None and case.x_scale.shape == (3, 32)
    wide = replace(case, x=dequantize_blocks(case.x, case.x_scale), x_scale=None)
    assert torch.equal(lora_shrink(*case.shrink), lora_shrink(*wide.shrink))


def run_shrink(case: LoraCase, **options: int | None) -> None:
    fast = case.x.dtype == FP8 and case.x.is_cuda  # fp8 tensor cores keep 14 bits of a running sum
    (planes,) = check_kernel(
        OPS["lora_shrink"], *case.shrink, tolerances={0: Tolerance(2e-3, 2e-3)} if fast else SHRINK, **options
    )
    assert (planes[:, case.adapter_index < 0] == 0).all()


def budgets(request: pytest.FixtureRequest, more: int = 0) -> list[dict[str, int]]:
    """All SMs or one, in turns; with --exhaustive both. A case comes in several dtypes, so that it has both."""
    both: list[dict[str, int]] = [{}, {"sm_budget": 1}]
    turn = (request.node.callspec.indices["make"] + more) % 2
    return both if request.config.getoption("--exhaustive") else [both[turn]]


@pytest.mark.interpret
@pytest.mark.parametrize("stored", [FP8, INT8])
@pytest.mark.parametrize(
    "make",
    [
        lambda: lora_case(1, 256, 16, [32], tile=16, splits=2, adapter_index=torch.tensor([2])),  # one block a plane
        lambda: lora_case(17, 1152, 48, [64], tile=16, splits=3),  # three of four blocks
        lambda: lora_case(32, 1024, 32, [64, 33], tile=16, splits=2),
        lambda: lora_case(64, 768, 16, [64], tile=16, splits=1),  # more columns than are loaded at once
        lambda: lora_case(64, 384, 16, [50, 30, 20], tile=64, splits=2),
        lambda: lora_case(5, 1152, 16, [64], tile=16, splits=16),  # more planes than there are columns for
        lambda: lora_case(6, 512, 16, [32], tile=16, splits=3),  # two full planes and an empty one
        lambda: lora_case(6, 128, 16, [32], adapter_index=torch.full((6,), -1)),
    ],
)
def test_kernels_with_scales_by_block(
    make: Callable[[], LoraCase], stored: torch.dtype, request: pytest.FixtureRequest
) -> None:
    for budget in budgets(request, more=stored == FP8):
        run_shrink(by_block(make(), stored), **budget)


@pytest.mark.parametrize("shape", [(2, 32), (3, 16), (3, 64), (1, 4)])
def test_shrink_names_scales_that_are_not_by_block(shape: tuple[int, int]) -> None:
    case = by_block(lora_case(4, 384, 16, [32]))
    with pytest.raises(ValueError, match=rf"x \(4, 384\) has scales \({shape[0]}, {shape[1]}\).*\[K / 128, 32\]"):
        OPS["lora_shrink"].launch(
            *replace(case, x_scale=torch.ones(shape)).shrink, out=(torch.empty(case.splits, 4, 16),)
        )


def test_shrink_names_columns_that_are_no_whole_blocks() -> None:
    case = lora_case(4, 200, 16, [32]).quantized(True, INT8)
    with pytest.raises(ValueError, match=r"x \(4, 200\).*multiple of 128"):
        OPS["lora_shrink"].launch(*replace(case, x_scale=torch.ones(1, 32)).shrink, out=(torch.empty(1, 4, 16),))


def run_kernels(case: LoraCase, **options: int | None) -> None:
    dtype = F32 if case.b.dtype == F32 else BF16
    fast = case.x.dtype == FP8 and case.x.is_cuda  # fp8 tensor cores keep 14 bits of a running sum
    (planes,) = check_kernel(
        OPS["lora_shrink"], *case.shrink, tolerances={0: Tolerance(2e-3, 2e-3)} if fast else SHRINK, **options
    )
    assert (planes[:, case.adapter_index < 0] == 0).all()
    (delta,) = check_kernel(OPS["lora_expand"], *case.expand(planes), tolerances=EXPAND[dtype], **options)
    assert (delta[case.adapter_index < 0] == 0).all()
    if not options:  # lora's own launch takes none
        check_kernel(OPS["lora"], *case.lora, tolerances=LORA[dtype])


@pytest.mark.interpret
@pytest.mark.parametrize(
    "make",
    [
        lambda: lora_case(9, 256, 16, [50, 30, 20], tile=16, splits=2),
        lambda: lora_case(70, 384, 48, [128, 64], tile=32, splits=3),
        lambda: lora_case(33, 200, 32, [100], tile=64, splits=1, dtype=F32),
        lambda: lora_case(40, 512, 64, [150, 64, 64], tile=64, splits=2),
        lambda: lora_case(5, 1100, 16, [64], tile=16, splits=9),  # more planes than there are columns for
        lambda: lora_case(6, 512, 16, [32], tile=16, splits=3).quantized(
            True, INT8
        ),  # two full planes and an empty one
        lambda: lora_case(18, 128, 128, [64], tile=16, splits=1),
        lambda: lora_case(1, 128, 16, [32], dtype=F32),
        lambda: lora_case(6, 128, 16, [32], adapter_index=torch.full((6,), -1)),
        lambda: lora_case(9, 256, 16, [50, 30, 20], tile=16, splits=2).quantized(True),
        lambda: lora_case(70, 384, 48, [128, 64], tile=32, splits=3).quantized(False),
        lambda: lora_case(70, 384, 48, [128, 64], tile=64, splits=3).quantized(True),
        lambda: lora_case(5, 1100, 16, [64], tile=16, splits=9).quantized(False),
        lambda: lora_case(6, 128, 16, [32], adapter_index=torch.full((6,), -1)).quantized(True),
        lambda: lora_case(9, 256, 16, [50, 30, 20], tile=16, splits=2).quantized(True, INT8),
        lambda: lora_case(70, 384, 48, [128, 64], tile=32, splits=3).quantized(False, INT8),
        lambda: lora_case(70, 1500, 48, [128, 64], tile=64, splits=1).quantized(True, INT8),
        lambda: lora_case(5, 1100, 16, [64], tile=16, splits=9).quantized(True, INT8),
        lambda: lora_case(5, 128, 16, [64], tile=16, splits=1, dtype=torch.float16).quantized(False, INT8),
        lambda: lora_case(18, 256, 256, [96, 40], tile=16, splits=2),  # two blocks of ranks
        lambda: lora_case(34, 256, 144, [64, 33], tile=32, splits=2).quantized(True, INT8),  # the second is not full
        lambda: lora_case(20, 128, 256, [80], tile=64, splits=1, dtype=F32),
        lambda: lora_case(7, 256, 208, [50], tile=16, splits=2).quantized(False),
    ],
)
def test_kernels(make: Callable[[], LoraCase], request: pytest.FixtureRequest) -> None:
    for budget in budgets(request):
        run_kernels(make(), **budget)


@pytest.mark.interpret
def test_tokens_without_adapter_ignore_their_planes() -> None:
    case = lora_case(20, 128, 16, [32])
    planes = lora_shrink_reference(*case.shrink)
    poison(planes[:, case.adapter_index < 0])
    check_kernel(OPS["lora_expand"], *case.expand(planes.clone()), tolerances=EXPAND[BF16])


@pytest.mark.parametrize(
    ("slices", "message"), [([64, 32], "add up to 64"), ([16] * 4, "1 to 3 slices"), ([32, 32], "32 ranks for each")]
)
def test_expand_names_wrong_slices(slices: list[int], message: str) -> None:
    case = lora_case(4, 128, 32, [64])
    planes = lora_shrink_reference(*case.shrink)
    with pytest.raises(ValueError, match=message):
        OPS["lora_expand"].launch(
            planes, case.b, case.token_order, case.tiles, case.tile, slices, out=(case.x.new_empty(4, 64),)
        )


@pytest.mark.parametrize("stored", [FP8, INT8])
def test_scales_belong_to_eight_bits(stored: torch.dtype) -> None:
    plain, quantized = lora_case(4, 128, 16, [32]), lora_case(4, 128, 16, [32]).quantized(True, stored)
    with pytest.raises(
        ValueError,
        match=rf"a is {stored}.*with scales None.*float8_e4m3fn and torch.int8|a is {stored}.*int8 and "
        r"torch.float8_e4m3fn",
    ):
        OPS["lora_shrink"].launch(*quantized.shrink[:6], None, quantized.x_scale, out=(torch.empty(1, 4, 16),))
    with pytest.raises(ValueError, match=r"x is torch.bfloat16.*with scales"):
        OPS["lora_shrink"].launch(plain.x, *quantized.shrink[1:], out=(torch.empty(1, 4, 16),))
    with pytest.raises(ValueError, match=rf"b is {stored}.*with scales None"):
        OPS["lora_expand"].launch(*quantized.expand(torch.zeros(1, 4, 16))[:6], out=(torch.empty(4, 32, dtype=BF16),))


@pytest.mark.parametrize(("activations", "stacks"), [(FP8, INT8), (INT8, FP8), (INT8, BF16), (FP8, BF16)])
def test_shrink_names_stacks_that_do_not_go_with_the_activations(activations: torch.dtype, stacks: torch.dtype) -> None:
    plain = lora_case(4, 128, 16, [32])
    x, a = plain.quantized(True, activations), plain if stacks == BF16 else plain.quantized(False, stacks)
    with pytest.raises(ValueError, match=rf"lora_shrink: a is {stacks}\(4, 16, 128\) for x {activations}"):
        OPS["lora_shrink"].launch(x.x, a.a, *plain.shrink[2:6], a.a_scale, x.x_scale, out=(torch.empty(1, 4, 16),))


def test_expand_names_too_many_ranks() -> None:
    case = lora_case(4, 128, 272, [64])
    with pytest.raises(ValueError, match=r"has 272 ranks; at most 256"):
        OPS["lora_expand"].launch(*case.expand(torch.zeros(1, 4, 272)), out=(case.x.new_empty(4, 64),))


def test_shrink_names_odd_ranks() -> None:
    case = lora_case(4, 128, 12, [64])
    with pytest.raises(ValueError, match="multiple of 16"):
        OPS["lora_shrink"].launch(*case.shrink, out=(torch.empty(1, 4, 12),))


LINEARS = {
    "qkv": (4096, [4096, 1024, 1024]),
    "o": (4096, [4096]),
    "gate_up": (4096, [14336, 14336]),
    "down": (14336, [4096]),
}


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 64, 256, 2048])
@pytest.mark.parametrize("ranks", [16, 32, 64, 144, 256])
@pytest.mark.parametrize("linear", LINEARS)
@pytest.mark.parametrize("stored", ["bf16", "fp8", "fp8 x", "int8", "int8 x"])
def test_on_the_gpu(stored: str, linear: str, ranks: int, tokens: int) -> None:
    k, slices = LINEARS[linear]
    case = lora_case(tokens, k, ranks, slices, slots=8, device="cuda")
    case = case if stored == "bf16" else case.quantized("x" in stored, INT8 if "int8" in stored else FP8)
    run_kernels(case)
    if tokens == 64:
        run_kernels(case, sm_budget=33)


@pytest.mark.gpu
@pytest.mark.parametrize(("k", "ranks", "slices"), [(256, 48, [256, 64, 64]), (256, 128, [704, 704]), (704, 16, [256])])
@pytest.mark.parametrize("dtype", [F32, BF16, FP8, INT8])
@pytest.mark.parametrize("tokens", [3, 200, 600])
def test_small_models_on_the_gpu(dtype: torch.dtype, k: int, ranks: int, slices: list[int], tokens: int) -> None:
    if dtype in (FP8, INT8):
        for activations in (False, True):
            run_kernels(lora_case(tokens, k, ranks, slices, device="cuda").quantized(activations, dtype))
    else:
        run_kernels(lora_case(tokens, k, ranks, slices, dtype=dtype, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("k", "ranks", "slices"),
    [(4096, 32, [4096]), (4096, 64, [4096, 1024, 1024]), (14336, 32, [4096]), (1152, 48, [256])],
)
@pytest.mark.parametrize("stored", [FP8, INT8])
@pytest.mark.parametrize("tokens", [1, 8, 17, 32, 64, 300])
def test_scales_by_block_on_the_gpu(tokens: int, stored: torch.dtype, k: int, ranks: int, slices: list[int]) -> None:
    case = by_block(lora_case(tokens, k, ranks, slices, slots=8, device="cuda"), stored)
    run_shrink(case)
    run_shrink(case, sm_budget=33)
    run_shrink(replace(case, splits=3))


@pytest.mark.gpu
def test_expand_after_shrink_with_pdl() -> None:
    """Launched early, the expand still sees what the shrink before it wrote: new inputs each time, planes poisoned
    between.
    """
    for _ in range(20):
        case = lora_case(64, 4096, 32, [14336, 14336], slots=8, device="cuda")
        planes, delta = poison(OPS["lora_shrink"].fake(*case.shrink)), poison(case.x.new_empty(64, 28672))
        torch.cuda.synchronize()
        OPS["lora_shrink"].launch(*case.shrink, out=(planes,), sm_budget=33)
        OPS["lora_expand"].launch(*case.expand(planes), out=(delta,), sm_budget=33, pdl=True)
        assert_near(delta, lora_expand_reference(*case.expand(planes)), EXPAND[BF16][0])


def machine_code(
    tokens: int, k: int, ranks: int, slices: list[int], dtype: torch.dtype
) -> tuple[MachineCode, MachineCode]:
    """Shrink and expand; `dtype` e4m3 or int8: of quantized stacks and activations."""

    def meta(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def scale(*shape: int) -> torch.Tensor | None:
        return torch.empty(shape, device="meta") if dtype in (FP8, INT8) else None

    tile = lora_tile(tokens)
    plan = lora_plan_fake(torch.empty(tokens, dtype=torch.int32, device="meta"), 8, tile)
    shrink = (
        meta(tokens, k),
        meta(8, len(slices) * ranks, k),
        *plan,
        tile,
        lora_splits(k, tokens),
        scale(8, len(slices) * ranks),
        scale(tokens),
    )
    (first,) = launched(lora_shrink, *shrink, pdl=True)
    (second,) = launched(
        lora_expand,
        lora_shrink.fake(*shrink),
        meta(8, sum(slices), ranks),
        *plan,
        tile,
        slices,
        scale(8, sum(slices)),
        pdl=True,
    )
    return first, second


@pytest.mark.machine_code
@pytest.mark.parametrize(
    ("tokens", "k", "ranks", "slices"),
    [
        (32, 4096, 32, [4096, 1024, 1024]),
        (8, 14336, 16, [4096]),
        (2048, 4096, 64, [14336, 14336]),
        (32, 4096, 256, [4096, 1024, 1024]),
        (2048, 4096, 256, [4096]),
    ],
)
@pytest.mark.parametrize("dtype", [BF16, FP8, INT8])
def test_machine_code(dtype: torch.dtype, tokens: int, k: int, ranks: int, slices: list[int]) -> None:
    shrink, expand = machine_code(tokens, k, ranks, slices, dtype)
    for code in (shrink, expand):
        assert code.spills == 0 and code.sass["ATOMG"] + code.sass["RED"] == 0
        assert sum(code.sass[word] for word in ("HMMA", "IMMA", "HGMMA", "QGMMA", "IGMMA")) > 0
    if tokens > 256:
        assert shrink.sass["LDGSTS"] > 0, "A's rows are not pipelined"
    else:
        assert shrink.registers <= (64 if dtype == BF16 else 112) and "for" not in shrink.name, (
            "it leaves no room next to a base GEMM"
        )
        assert ".v4." in shrink.ptx_text and shrink.sass["BRA"] <= 2, "A's rows are not loaded at once"
    if dtype == INT8:
        assert shrink.sass["IMMA"] + shrink.sass["IGMMA"] > 0, "int8 activations are widened"
    if tokens <= 64 and dtype != BF16 and ranks <= 128:
        assert expand.registers <= (64 if dtype == FP8 else 72), "it leaves no room next to a base GEMM"
    wait = "griddepcontrol.wait"
    assert shrink.ptx_text.index(wait) < shrink.ptx_text.index("ld.global"), (
        "the shrink reads before its producer has finished"
    )
    assert shrink.ptx_text.index(wait) < shrink.ptx_text.index("griddepcontrol.launch_dependents"), (
        "an early expand might read an unfinished plan"
    )
    if ranks <= 128 or dtype != BF16:
        assert ".v4." in expand.ptx_text[: expand.ptx_text.index(wait)], "B's rows are not loaded before the wait"


@pytest.mark.machine_code
@pytest.mark.parametrize(("tokens", "ranks"), [(8, 144), (8, 256), (2048, 256)])
@pytest.mark.parametrize("dtype", [BF16, FP8, INT8])
def test_many_planes_of_many_ranks_fit(dtype: torch.dtype, tokens: int, ranks: int) -> None:
    """`compile_launch` checks the shared memory. The looping expand of 16-bit rows spills some registers."""
    _, expand = machine_code(tokens, 14336, ranks, [4096], dtype)
    assert expand.spills == 0 or dtype == BF16


def test_fp32_machine_code_keeps_fp32() -> None:
    for code in machine_code(64, 256, 32, [256, 64, 64], F32):
        assert code.spills == 0 and code.sass["HMMA"] == 0 and code.sass["FFMA"] > 0


@pytest.mark.machine_code
@pytest.mark.parametrize(("tokens", "k", "ranks"), [(32, 4096, 32), (8, 14336, 32), (8, 4096, 16), (64, 14336, 32)])
@pytest.mark.parametrize("dtype", [FP8, INT8])
def test_machine_code_with_scales_by_block(dtype: torch.dtype, tokens: int, k: int, ranks: int) -> None:
    def meta(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    tile = lora_tile(tokens)
    plan = lora_plan_fake(meta(tokens, dtype=torch.int32), 8, tile)
    shrink = (
        meta(tokens, k, dtype=dtype),
        meta(8, ranks, k, dtype=dtype),
        *plan,
        tile,
        lora_splits(k, tokens),
        meta(8, ranks),
        meta(k // 128, padded_scales(tokens)),
    )
    (code,) = launched(lora_shrink, *shrink, pdl=True)
    assert code.spills == 0 and code.registers <= 96 and code.sass["ATOMG"] + code.sass["RED"] == 0
    assert code.sass["IMMA" if dtype == INT8 else "HMMA"] > 0
    if tokens <= 32:
        assert ".v4." in code.ptx_text and code.sass["BRA"] <= 2, "A's rows are not loaded at once"
    else:
        assert code.sass["LDGSTS"] > 0, "A's rows are not pipelined"
    assert code.ptx_text.index("griddepcontrol.wait") < code.ptx_text.index("ld.global"), (
        "the shrink reads before its producer has finished"
    )
