"""Too little device memory raises an error with the missing bytes and remedies."""

import re

import pytest
import torch
from sidestream.runtime.api.errors import CapacityError
from sidestream.runtime.worker.memory_budget import GIB, MemoryDemand, nbytes, plan_cpu_pages, plan_pages

DEMAND = MemoryDemand(weights=8 * GIB, adapters=2 * GIB, activations=GIB, page=4 << 20, reserve=GIB)


def test_pages_fill_what_is_left():
    assert plan_pages(DEMAND, 79 * GIB, 80 * GIB, 0.9, 8192, 1024) == (72 - 12) * GIB // (4 << 20)
    assert plan_pages(DEMAND, 79 * GIB, 80 * GIB, 0.9, 640, 16) == 160, "more than all sequences can use is not taken"


def test_what_is_missing_and_what_would_help():
    with pytest.raises(CapacityError) as caught:
        plan_pages(DEMAND, 15 * GIB, 16 * GIB, 0.8, 65536, 16)
    text = str(caught.value)
    left = int(16 * GIB * 0.8) - 12 * GIB
    assert text.startswith(f"{(1024 * (4 << 20) - left) / GIB:.2f} GiB of device memory are missing")
    holds = int(re.search(r"lower max_model_len to (\d+)", text).group(1))
    assert plan_pages(DEMAND, 15 * GIB, 16 * GIB, 0.8, holds, 16) >= holds // 64
    for remedy in (
        "gpu_memory_utilization from 0.8",
        "max_num_seqs",
        "max_loras or max_lora_rank",
        "weights 8.00 GiB",
        "adapter stacks 2.00 GiB",
    ):
        assert remedy in text


def test_stacks_of_experts_are_named():
    demand = MemoryDemand(GIB, 9 * GIB, GIB, 4 << 20, GIB, slots=9, expert_slot=830 << 20)
    with pytest.raises(CapacityError) as caught:
        plan_pages(demand, 10 * GIB, 16 * GIB, 0.8, 8192, 16)
    text = str(caught.value)
    assert "adapter stacks 9.00 GiB (of these expert stacks 7.29 GiB: 8 + 1 slots x 830 MiB)" in text
    assert "lower max_loras or max_expert_rank (adapters)" in text and "max_lora_rank" not in text


def test_others_on_the_device_are_named():
    with pytest.raises(CapacityError, match=r"free the 70\.00 GiB that other processes use"):
        plan_pages(DEMAND, 10 * GIB, 80 * GIB, 0.9, 8192, 16)


def test_weights_alone_can_be_too_much():
    with pytest.raises(CapacityError) as caught:
        plan_pages(MemoryDemand(20 * GIB, 0, GIB, 4 << 20), 15 * GIB, 16 * GIB, 0.97, 64, 1)
    assert "max_model_len to" not in str(caught.value) and "max_loras" not in str(caught.value)


def test_a_modest_pool_on_the_cpu():
    assert plan_cpu_pages(1 << 20, 640, 4) == 40
    assert plan_cpu_pages(1 << 20, 8192, 16) == 512
    assert plan_cpu_pages(1 << 30, 640, 4) == 10


def test_bytes():
    assert (
        nbytes({"a": ((2, 3), torch.float32), "b": ((5,), torch.float8_e4m3fn), "c": ((), torch.bfloat16)})
        == 24 + 5 + 2
    )
