"""`embedding`: rows of the table picked by token id."""

from typing import Any

import pytest
import torch
from sidestream.ops.elementwise.embedding import embedding
from support.checks import EXACT, check_kernel
from support.sm90 import launched


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_kernel(dtype: torch.dtype, ids: torch.dtype) -> None:
    check_kernel(embedding, torch.randint(0, 50, (7,), dtype=ids), torch.randn(50, 96).to(dtype), tolerances={0: EXACT})


@pytest.mark.interpret
def test_kernel_of_a_scaled_stream() -> None:
    weight = (30 * torch.randn(50, 96)).bfloat16()
    weight[3, 5], weight[3, 6], weight[3, 7] = 1.5e6, float("nan"), 1e-5
    ids = torch.tensor([3, 49, 0, 3])
    (rows,) = check_kernel(embedding, ids, weight, torch.float16, tolerances={0: EXACT})
    assert rows.dtype == torch.float16 and rows[0, 5] == 65504.0 and rows[3, 6].isnan()
    assert torch.equal(16 * rows[1].float(), weight[49].float()), "sixteenths of bf16 in fp16 are exact"


@pytest.mark.interpret
def test_an_id_outside_the_vocabulary_reads_as_zeros() -> None:
    weight = torch.randn(50, 64)
    out = torch.full((3, 64), float("nan"))
    embedding.launch(torch.tensor([50, -1, 4]), weight, out=(out,))
    assert torch.equal(out, torch.stack((torch.zeros(64), torch.zeros(64), weight[4])))


def lora_operands(slots: int, vocab: int, width: int, rank: int, tokens: int, dtype: torch.dtype) -> tuple[Any, ...]:
    a, b = torch.randn(slots, vocab, rank).to(dtype), torch.randn(slots, width, rank).to(dtype)
    return a, b, torch.randint(-1, slots, (tokens,), dtype=torch.int32)


@pytest.mark.parametrize("stream", [None, torch.float16])
def test_opcheck_with_lora(stream: torch.dtype | None) -> None:
    operands = lora_operands(3, 50, 64, 16, 7, torch.bfloat16)
    torch.library.opcheck(
        embedding.overload, (torch.randint(0, 50, (7,)), torch.randn(50, 64).bfloat16(), stream, *operands)
    )


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("dtype", "stream"), [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, torch.float16)]
)
@pytest.mark.parametrize(("width", "rank"), [(96, 16), (160, 48), (1056, 16)])
def test_kernel_with_lora(dtype: torch.dtype, stream: torch.dtype | None, width: int, rank: int) -> None:
    """Ranks and widths that are no powers of two, and several programs a row."""
    ids, weight = torch.randint(0, 50, (9,)), torch.randn(50, width).to(dtype)
    a, b, index = lora_operands(3, 50, width, rank, 9, dtype)
    index[:3] = torch.tensor([-1, 0, 2])
    (rows,) = check_kernel(embedding, ids, weight, stream, a, b, index)
    assert torch.equal(rows[0], embedding.reference(ids[:1], weight, stream)[0]), "without an adapter: the base's bits"


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [16, 64, 512])
@pytest.mark.parametrize("tokens", [1, 64, 2048])
def test_kernel_with_lora_on_the_gpu(tokens: int, rank: int) -> None:
    weight = torch.randn(32000, 4096, device="cuda", dtype=torch.bfloat16)
    ids = torch.randint(0, 32000, (tokens,), device="cuda")
    operands = [each.cuda() for each in lora_operands(2, 32000, 4096, rank, tokens, torch.bfloat16)]
    check_kernel(embedding, ids, weight, torch.float16, *operands)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 64, 200, 2048])
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("stream", [None, torch.float16])
def test_kernel_on_the_gpu(tokens: int, pdl: bool, stream: torch.dtype | None) -> None:
    weight = torch.randn(128256, 4096, device="cuda", dtype=torch.bfloat16)
    ids = torch.randint(0, 128256, (tokens,), device="cuda")
    check_kernel(embedding, ids, weight, stream, tolerances={0: EXACT}, pdl=pdl)


@pytest.mark.parametrize("stream", [None, torch.float16])
def test_machine_code(stream: torch.dtype | None) -> None:
    weight = torch.empty(128256, 4096, device="meta", dtype=torch.bfloat16)
    (code,) = launched(embedding, torch.empty(64, device="meta", dtype=torch.int64), weight, stream, pdl=True)
    assert code.spills == 0
    assert "LDG.E.128" in code.sass_text or "LDG.E.128.CONSTANT" in code.sass_text
    assert code.ptx_count("griddepcontrol.wait") == 1


@pytest.mark.machine_code
@pytest.mark.parametrize("rank", [16, 48, 512])
def test_machine_code_with_lora(rank: int) -> None:
    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, device="meta", dtype=dtype)

    stacks = empty(8, 128256, rank), empty(8, 4096, rank), empty(64, dtype=torch.int32)
    operands = (empty(64, dtype=torch.int64), empty(128256, 4096), torch.float16, *stacks)
    (code,) = launched(embedding, *operands, pdl=True)
    assert code.spills == 0 and code.ptx_count("griddepcontrol.wait") == 1
