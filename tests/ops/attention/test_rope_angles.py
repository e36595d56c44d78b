"""`rope_angles` against transformers, and its kernel against the reference at long contexts."""

import pytest
import torch
from sidestream.ops.attention.rope import rope_angles
from support.checks import Tolerance, check_kernel
from support.sm90 import launched

POSITIONS = [0, 1, 77, 4095, 131071]
# of values up to 1; half a step of the angle itself is 4e-3 at 131071
NEAR = {0: Tolerance(atol=2e-6), 1: Tolerance(atol=2e-6)}


def inverse_frequencies(half: int) -> torch.Tensor:
    return 500000.0 ** -(torch.arange(half) / half)


def test_reference_is_transformers_table() -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rotary = LlamaRotaryEmbedding(LlamaConfig(hidden_size=128, num_attention_heads=2, head_dim=64))
    positions = torch.tensor(POSITIONS)
    theirs = rotary(torch.empty(1), positions[None])
    for ours, want in zip(rope_angles(positions, rotary.inv_freq), theirs, strict=True):
        torch.testing.assert_close(ours[:, 0], want[0], rtol=0, atol=1e-6)


@pytest.mark.interpret
@pytest.mark.parametrize(("dtype", "half"), [(torch.int32, 32), (torch.int64, 32), (torch.int64, 48)])
def test_kernel(dtype: torch.dtype, half: int) -> None:
    check_kernel(rope_angles, torch.tensor(POSITIONS, dtype=dtype), inverse_frequencies(half), tolerances=NEAR)


@pytest.mark.gpu
@pytest.mark.parametrize("half", [32, 48, 64])
def test_kernel_on_the_gpu(half: int) -> None:
    positions = torch.cat([torch.tensor(POSITIONS), torch.randint(0, 131072, (2000,))]).cuda()
    check_kernel(rope_angles, positions, inverse_frequencies(half).cuda(), tolerances=NEAR, pdl=True)


@pytest.mark.parametrize("half", [48, 64])
def test_machine_code(half: int) -> None:
    (code,) = launched(
        rope_angles, torch.empty(64, device="meta", dtype=torch.int64), torch.empty(half, device="meta"), pdl=True
    )
    # with Triton 3.6 the cosine of an angle above 105,615 has digits of 2/pi in local memory, and nothing else is there
    assert code.local_bytes <= 32
