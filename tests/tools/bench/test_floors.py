"""The floor formula gives the figures that Llama-3.1-8B is known by."""

import pytest
from sidestream.compiler.cost.hardware import H100, H200
from sidestream.tools.bench.floors import (
    adapter_bytes,
    decode_floor_ms,
    kv_bytes_per_token,
    weight_bytes,
)
from sidestream.tools.options.models import LLAMA_8B, SHAPES, pick_adapters


def test_bytes_of_llama_8b() -> None:
    head = LLAMA_8B["vocab_size"] * LLAMA_8B["hidden_size"]
    assert head == pytest.approx(0.53e9, rel=0.01)
    assert weight_bytes(LLAMA_8B, "fp8") - head == pytest.approx(6.98e9, rel=0.002)
    assert weight_bytes(LLAMA_8B, "fp8", "bf16") - weight_bytes(LLAMA_8B, "fp8") == head
    assert weight_bytes(LLAMA_8B, "bf16") == pytest.approx(2 * weight_bytes(LLAMA_8B, "fp8"), rel=0.002)
    assert kv_bytes_per_token(LLAMA_8B, 1) == 65536
    assert adapter_bytes(LLAMA_8B, 32) == pytest.approx(168e6, rel=0.002)


def test_floor_of_one_request_and_of_four_adapters() -> None:
    weights, kv = weight_bytes(LLAMA_8B, "fp8"), kv_bytes_per_token(LLAMA_8B, 1)
    speed = H200.bytes_per_second()
    alone = decode_floor_ms(weights, kv, 272, 0, speed)
    assert alone == pytest.approx(1.6, abs=0.05)
    four = decode_floor_ms(weights, kv, 272, 4 * adapter_bytes(LLAMA_8B, 32), speed)
    assert four - alone == pytest.approx(0.14, abs=0.01)
    assert decode_floor_ms(weights, kv, 272, 0, H100.bytes_per_second()) == pytest.approx(alone * 4.68 / 3.03)


def test_llama_70b_is_as_large_as_it_is_called_and_two_gpus_read_a_half_each() -> None:
    weights = weight_bytes(SHAPES["llama-3.1-70b"], "int8")
    assert weights == pytest.approx(69.5e9, rel=0.005), "the embedding, of which few rows are read, is left out"
    assert decode_floor_ms(weights, 0, 0, 0, 1e12, 2) == decode_floor_ms(weights, 0, 0, 0, 1e12) / 2


def test_a_mixture_of_experts_reads_the_experts_that_its_tokens_choose() -> None:
    qwen = SHAPES["qwen3-30b-a3b"]
    read = [weight_bytes(qwen, "int8", tokens=count) / 1e9 for count in (1, 8, 64, 256)]
    assert read == pytest.approx([3.05, 12.9, 29.8, 30.2], rel=0.01)
    assert weight_bytes(qwen, "int8") / 1e9 == pytest.approx(30.2, rel=0.01)
    experts = [adapter_bytes(qwen, 16, element_bytes=1, tokens=count) for count in (1, 8, None)]
    attention = 16 * 48 * (2048 + 4096 + 2 * (2048 + 512) + 4096 + 2048)  # of 48 layers: q, k and v, o
    assert [each - attention for each in experts] == pytest.approx(
        [830e6 * 8 / 128, 830e6 * 51.6 / 128, 830e6], rel=0.01
    )
    dense = SHAPES["qwen3-8b"]
    assert weight_bytes(dense, "int8", tokens=1) == weight_bytes(dense, "int8"), "all tokens read the same weights"


def test_adapter_mixes() -> None:
    names = [f"adapter-{index}" for index in range(8)]
    assert pick_adapters("none", names, 5, 0) == [None] * 5
    assert pick_adapters("four", names, 6, 0) == [*names[:4], *names[:2]]
    many = pick_adapters("zipf", names, 4000, 0)
    assert many == pick_adapters("zipf", names, 4000, 0) != pick_adapters("zipf", names, 4000, 1)
    counts = [many.count(name) for name in names]
    assert counts[0] / counts[3] == pytest.approx(4, rel=0.25), (
        "the fourth adapter is a quarter as popular as the first"
    )
    assert set(pick_adapters("zipf", names, 64, 0)) == set(names), "with 64 requests every adapter is active"
