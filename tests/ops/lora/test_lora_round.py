"""lora_round: the specification against loops, the kernel against it, its machine code."""

import pytest
import torch
from sidestream.ops.core.registry import OPS
from sidestream.ops.lora.expand_rounded import lora_round
from support.checks import assert_near, check_kernel, poison
from support.lora import lora_case
from support.sm90 import launched

CASES = [
    (1, 1, 1, 32),
    (2, 5, 2, 16),
    (3, 9, 3, 8),
    (4, 33, 2, 32),
    (5, 7, 3, 24),
    (6, 17, 1, 64),
    (7, 3, 2, 64),
    (8, 20, 3, 32),
    (1, 40, 2, 24),
]


def planes_of(splits: int, tokens: int, parts: int, rank: int, device: str = "cpu") -> torch.Tensor:
    """Random planes with rows, and parts of rows, of different magnitudes."""
    size = torch.logspace(-3, 3, tokens * parts, device=device).view(tokens, parts, 1)
    return (torch.randn(splits, tokens, parts, rank, device=device) * size).flatten(2)


@pytest.mark.parametrize(("splits", "tokens", "parts", "rank"), CASES[:5])
def test_specification_against_loops(splits: int, tokens: int, parts: int, rank: int) -> None:
    planes = planes_of(splits, tokens, parts, rank)
    q, step = lora_round(planes, parts)
    assert (
        q.dtype == torch.int8
        and q.shape == (tokens, parts * rank)
        and step.dtype == torch.float32
        and step.shape == (tokens, parts)
    )
    for token in range(tokens):
        for part in range(parts):
            row = planes[:, token, part * rank : (part + 1) * rank].double().sum(0)
            got = q[token, part * rank : (part + 1) * rank].double()
            assert got.abs().max() == 127 and step[token, part].item() == pytest.approx(
                row.abs().max().item() / 127, rel=1e-5
            )
            assert (got * step[token, part].double() - row).abs().max() <= 0.501 * step[token, part]


def test_fake_has_its_shapes() -> None:
    q, step = lora_round.fake(torch.empty(4, 7, 72, device="meta"), 3)
    assert (q.shape, q.dtype, step.shape, step.dtype) == ((7, 72), torch.int8, (7, 3), torch.float32)


@pytest.mark.interpret
@pytest.mark.parametrize(("splits", "tokens", "parts", "rank"), CASES)
def test_kernel(splits: int, tokens: int, parts: int, rank: int) -> None:
    check_kernel(lora_round, planes_of(splits, tokens, parts, rank), parts)


@pytest.mark.interpret
def test_rows_of_zeros() -> None:
    planes = planes_of(3, 20, 2, 16)
    planes[:, 4] = 0.0
    planes[:, 7, 16:] = 0.0  # of one linear alone
    q, step = check_kernel(lora_round, planes, 2)
    assert not q[4].any() and not q[7, 16:].any() and q[7, :16].any() and (step > 0).all() and step.isfinite().all()
    q, _ = check_kernel(lora_round, torch.zeros(2, 3, 48), 1)
    assert not q.any()


@pytest.mark.interpret
def test_no_tokens() -> None:
    check_kernel(lora_round, torch.empty(2, 0, 32), 2)


@pytest.mark.parametrize(
    ("planes", "parts", "found"),
    [
        (torch.zeros(2, 3, 32, dtype=torch.bfloat16), 2, r"torch.bfloat16\(2, 3, 32\) for 2 linears"),
        (torch.zeros(3, 32), 2, r"\(3, 32\)"),
        (torch.zeros(2, 3, 32), 3, r"\(2, 3, 32\) for 3 linears; needs torch.float32 \[splits, T, n \* R\]"),
        (torch.zeros(2, 3, 32), 0, "for 0 linears"),
    ],
)
def test_names_what_does_not_fit(planes: torch.Tensor, parts: int, found: str) -> None:
    for call in (lora_round, lora_round.fake, lambda *args: lora_round.launch(*args, out=())):
        with pytest.raises(ValueError, match=rf"lora_round: planes .*{found}"):
            call(planes, parts)


def test_names_what_is_not_contiguous() -> None:
    with pytest.raises(ValueError, match=r"lora_round: planes has strides .*pass planes.contiguous"):
        lora_round.launch(
            torch.zeros(2, 3, 64)[..., ::2], 2, out=(torch.empty(3, 32, dtype=torch.int8), torch.empty(3, 2))
        )


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("splits", "tokens", "parts", "rank"), [*CASES, (4, 256, 2, 32), (4, 256, 3, 32), (1, 128, 2, 8), (2, 1000, 3, 64)]
)
@pytest.mark.parametrize("pdl", [False, True])
def test_kernel_on_the_gpu(splits: int, tokens: int, parts: int, rank: int, pdl: bool) -> None:
    check_kernel(lora_round, planes_of(splits, tokens, parts, rank, "cuda"), parts, pdl=pdl)


@pytest.mark.gpu
def test_after_shrink_with_pdl() -> None:
    """Launched early, it still sees what the shrink wrote: new inputs each time, planes poisoned between."""
    for tokens in (64, 200) * 10:
        made = lora_case(tokens, 4096, 32, [1024, 1024], slots=8, device="cuda")
        planes = poison(torch.empty(made.splits, tokens, 64, device="cuda"))
        out = tuple(poison(tensor) for tensor in lora_round.fake(planes, 2))
        torch.cuda.synchronize()
        OPS["lora_shrink"].launch(*made.shrink, out=(planes,))
        lora_round.launch(planes, 2, out=out, pdl=True)
        for got, want in zip(out, lora_round.reference(planes, 2), strict=True):
            assert_near(got, want)


@pytest.mark.machine_code
@pytest.mark.parametrize(("splits", "parts", "rank"), [(1, 2, 32), (4, 2, 32), (4, 3, 64), (8, 3, 24), (4, 2, 8)])
def test_machine_code(splits: int, parts: int, rank: int) -> None:
    (code,) = launched(lora_round, torch.empty(splits, 256, parts * rank, device="meta"), parts, pdl=True)
    assert code.spills == 0 and code.registers <= 64, "it takes the place of the projection's programs"
    assert (
        code.ptx_text.index("griddepcontrol.wait")
        < code.ptx_text.index("griddepcontrol.launch_dependents")
        < code.ptx_text.index("ld.global")
    )
    assert code.ptx_count("ld.global") == code.ptx_text.partition("st.global")[0].count("ld.global"), (
        "a load waits for a store"
    )
