"""`embedding`: rows of the table picked by token id."""

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
