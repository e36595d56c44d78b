"""`rope` against transformers, and its kernel against the reference."""

import pytest
import torch
from sidestream.ops.attention.rope import rope
from support.checks import check_kernel
from support.samples import angles, normal
from support.sm90 import launched


def test_reference_is_transformers_rotation() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, (cos, sin) = torch.randn(5, 3, 16), angles(5, 16)
    theirs, _ = apply_rotary_pos_emb(q.transpose(0, 1)[None], q.transpose(0, 1)[None], cos[:, 0][None], sin[:, 0][None])
    torch.testing.assert_close(rope(q, cos, sin), theirs[0].transpose(0, 1), rtol=1e-6, atol=1e-6)


def test_reference_takes_any_broadcastable_angles() -> None:
    x, (cos, sin) = torch.randn(2, 3, 5, 16), angles(5, 16)
    rotated = rope(x, cos.view(1, 1, 5, 16), sin.view(1, 1, 5, 16))
    assert torch.equal(rotated[1, 2], rope(x[1, 2].unsqueeze(1), cos, sin).squeeze(1))


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("heads", "width"), [(4, 64), (5, 128), (1, 16)])
def test_kernel(dtype: torch.dtype, heads: int, width: int) -> None:
    check_kernel(rope, normal(3, heads, width, dtype=dtype), *angles(3, width))
    check_kernel(rope, normal(3, heads, width, dtype=dtype), *(part.to(dtype) for part in angles(3, width)))


@pytest.mark.interpret
def test_kernel_on_a_view_of_a_packed_row_and_on_other_shapes() -> None:
    packed, (cos, sin) = normal(3, 6 * 16), angles(3, 16)
    check_kernel(rope, packed.view(3, 6, 16)[:, 2:4], cos, sin)
    check_kernel(rope, normal(2, 4, 3, 16), cos.view(1, 1, 3, 16), sin.view(1, 1, 3, 16))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 64, 200, 2048])
@pytest.mark.parametrize(("heads", "width"), [(32, 128), (8, 64)])
def test_kernel_on_the_gpu(tokens: int, heads: int, width: int) -> None:
    x, (cos, sin) = normal(tokens, heads, width).cuda(), angles(tokens, width)
    check_kernel(rope, x, cos.cuda(), sin.cuda(), pdl=True)


def test_machine_code() -> None:
    cos = torch.empty(64, 1, 128, device="meta")
    (code,) = launched(rope, torch.empty(64, 32, 128, device="meta", dtype=torch.bfloat16), cos, cos, pdl=True)
    assert code.spills == 0 and code.sass["BAR"] == 0
