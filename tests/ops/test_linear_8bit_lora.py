"""linear_8bit_lora_silu_mul: its reference against the ops that they are made of, the kernel in threads, compiled, and on a GPU."""
from typing import Any

import pytest
import torch
from sidestream import ops
from sidestream.ops.linear_8bit_lora_silu_mul import fits, linear_8bit_lora_silu_mul, programs
from sidestream.ops.linear_8bit_silu_mul import linear_8bit_silu_mul
from sidestream.ops.lora import lora
from sidestream.ops.lora_active import lora_active
from sidestream.ops.workspace import workspace
from support.checks import EXACT, Tolerance, assert_near, bits, check_kernel, poison
from support.gluon_threads import kernels_in_threads
from support.sm90 import launched

BF16, FP32 = torch.bfloat16, torch.float32
DEVIATION = 73.0  # of whole numbers from -127 to 127, all as likely
NEAR = Tolerance(rtol=2.0**-7, atol=4e-3)  # outputs are of order 1
LLAMA_8B = (4096, 14336)
SHARED = 228 * 1024  # of an SM, with the 1 KB that the system has of it for a CTA


def mixes(tokens: int, slots: int) -> dict[str, list[int]]:
    """Which token has which adapter."""
    return {
        "none": [-1] * tokens, "one": [slots - 1] * tokens, "different": [token % slots for token in range(tokens)],
        "some without": [(token * 5 + token // 7) % (slots + 1) - 1 if token % 3 else -1 for token in range(tokens)],
        "the last alone": [-1] * (tokens - 1) + [1],
    }  # fmt: skip


def inputs(tokens: int, k: int, width: int, rank: int = 32, slots: int = 5, index: list[int] | None = None, device: str = "cpu") -> tuple[Any, ...]:
    """(q, scale, weight, weight_scale, a, a_scale, b, b_scale, adapter_index, active); delta and projection are both of order 1."""
    def whole(*shape: int) -> torch.Tensor:
        return torch.randint(-127, 128, shape, dtype=torch.int8, device=device)

    def scales(size: float, *shape: int) -> torch.Tensor:
        return (torch.rand(shape, device=device) + 0.5) * size

    chosen = mixes(tokens, slots)["some without"] if index is None else index
    adapter_index = torch.tensor(chosen, dtype=torch.int32, device="cpu" if device == "meta" else device).to(device)
    active = torch.empty(-(-tokens // 128), slots + 1, dtype=torch.int32, device=device) if device == "meta" else lora_active(adapter_index, slots)
    each = 1 / (DEVIATION * k**0.5)
    return (whole(tokens, k), scales(1 / DEVIATION, tokens), whole(2 * width, k), scales(each, 2 * width),
            whole(slots, 2 * rank, k), scales(each, slots, 2 * rank), whole(slots, 2 * width, rank), scales(1 / (DEVIATION * rank**0.5), slots, 2 * width),
            adapter_index, active)  # fmt: skip


# The references


@pytest.mark.parametrize("mix", mixes(9, 5))
def test_reference_is_the_projection_with_a_delta(mix: str) -> None:
    args = inputs(9, 128, 192, rank=16, index=mixes(9, 5)[mix])
    q, scale, weight, weight_scale, a, a_scale, b, b_scale, index, _ = args
    delta = lora(q, a, b, index, [192, 192], a_scale, b_scale, scale)
    got = linear_8bit_lora_silu_mul(*args, FP32)
    assert_near(got, linear_8bit_silu_mul(q, scale, weight, weight_scale, delta.float(), FP32), Tolerance(2e-2, 6e-2))  # bf16 between A and B, here eight bits
    alone = linear_8bit_silu_mul(q, scale, weight, weight_scale, None, FP32)
    assert torch.equal(got[index < 0], alone[index < 0])
    assert mix == "none" or not torch.isclose(got[index >= 0], alone[index >= 0], rtol=0.1, atol=0.1).all()


def test_delta_is_a_times_b_of_each_token() -> None:
    """Token by token in fp64, with ranks' activations that eight bits hold: whole numbers of which the largest is 127."""
    q, scale, weight, weight_scale, a, a_scale, b, b_scale, index, active = inputs(7, 128, 64, rank=16)
    q = torch.nn.functional.one_hot(torch.randint(128, (7,)), 128).to(torch.int8)
    a[:, ::16] = 127
    scale, a_scale = torch.full_like(scale, 0.25), torch.full_like(a_scale, 0.25)
    a_scale[:, 16:] = 0.5
    weight_scale = weight_scale * 50
    got = linear_8bit_lora_silu_mul(q, scale, weight, weight_scale, a, a_scale, b, b_scale, index, active, FP32)
    for token, slot in enumerate(index.tolist()):
        y = 0.25 * weight_scale.double() * (weight.double() @ q[token].double())
        if slot >= 0:
            shrunk = a[slot].double() @ q[token].double() * a_scale[slot] / 4
            delta = torch.cat([b[slot, :64].double() @ shrunk[:16], b[slot, 64:].double() @ shrunk[16:]]) * b_scale[slot]
            y = y + delta
        assert_near(got[token], (torch.nn.functional.silu(y[:64]) * y[64:]).float())


def test_what_does_not_fit_is_told() -> None:
    args = inputs(5, 128, 64, rank=16)
    for place, wrong, reason in ((0, args[0].float(), "torch.float32, torch.int8"), (5, args[5][:, :-1], r"a_scale is \(5, 31\)"),
                                 (8, args[8][:-1], r"adapter_index is \(4,\)"), (9, args[9][:, 1:], "lora_active")):
        with pytest.raises(ValueError, match=reason):
            linear_8bit_lora_silu_mul(*args[:place], wrong, *args[place + 1:], BF16)


@pytest.mark.parametrize(("sizes", "reason"), [
    ((65, 28672, 4096, 32, 8, 132), None), ((256, 28672, 4096, 64, 8, 132), None), ((65, 512, 512, 32, 1, 2), None),
    ((257, 28672, 4096, 32, 8, 132), "257 tokens"), ((64, 28672, 4096, 32, 8, 132), "64 tokens"), ((65, 28800, 4096, 32, 8, 132), "28800 rows"),
    ((65, 28672, 4000, 32, 8, 132), "4000 input features"), ((65, 28672, 384, 32, 8, 132), "384 input features"), ((65, 28672, 4096, 16, 8, 132), "rank 16"),
    ((65, 28672, 4096, 32, 0, 132), "no adapters"), ((65, 28672, 4096, 32, 8, 1), "1 SMs"),
])
def test_sizes_that_do_not_fit_are_told(sizes: tuple[int, ...], reason: str | None) -> None:
    objection = fits(*sizes)
    assert objection is None if reason is None else reason in (objection or "")


@pytest.mark.parametrize("tokens", [65, 128, 129, 256])
@pytest.mark.parametrize("n", [512, 9728, 28672, 57344])
@pytest.mark.parametrize("sms", [2, 20, 99, 132])
def test_all_programs_are_resident_and_end_together(tokens: int, n: int, sms: int) -> None:
    split = programs(tokens, n, 8, sms)
    tiles = n // 256 * -(-tokens // 128)
    assert split.shrinking >= 1 and split.tiles + split.shrinking <= sms
    assert -(-tiles // split.tiles) * split.tiles - tiles < split.tiles and tiles >= split.tiles
    assert n < 28672 or sms < 132 or split.shrinking >= 8


# The kernel's own code, in threads on the CPU


def poison_scratch(device: torch.device) -> None:
    for name in ("ranks", "rank_scales", "places"):
        workspace(device, f"linear_8bit_lora.{name}", 1).fill_(0xFF)  # NaN, -1


def launch_in_threads(args: tuple[Any, ...], **options: Any) -> torch.Tensor:
    out = poison(linear_8bit_lora_silu_mul.fake(*args, BF16))
    poison_scratch(out.device)
    with kernels_in_threads(ops.linear_8bit_lora_silu_mul, ops.linear_8bit_lora_gluon, ops.linear_8bit_lora_pieces, ops.linear_8bit_lora_streams,
                            ops.linear_8bit_wide, ops.decoder_block_pieces, ops.decoder_block_streams):
        linear_8bit_lora_silu_mul.launch(*args, BF16, out=(out,), **options)
    assert not workspace(out.device, "linear_8bit_lora.counter", 4, zero=True).any(), "the counter is not as the next launch must find it"
    return out


@pytest.mark.parametrize("mix", mixes(1, 1))
@pytest.mark.parametrize(("tokens", "k", "width", "rank", "slots", "sms"), [
    (65, 512, 256, 32, 5, 132), (65, 640, 256, 64, 3, 9), (128, 512, 256, 32, 8, 5), (130, 1024, 384, 32, 5, 4), (130, 512, 256, 32, 19, 7),
    (100, 1024, 256, 64, 11, 2), (256, 512, 256, 64, 4, 3), (256, 640, 384, 32, 35, 3),
])
def test_kernel_in_threads_is_the_reference(tokens: int, k: int, width: int, rank: int, slots: int, sms: int, mix: str) -> None:
    args = inputs(tokens, k, width, rank, slots, mixes(tokens, slots)[mix])
    assert_near(launch_in_threads(args, sm_budget=sms), linear_8bit_lora_silu_mul.reference(*args, BF16), NEAR)


def test_launches_in_threads_may_follow_each_other_in_any_order() -> None:
    args = list(inputs(130, 512, 256, slots=4))
    for mix in ("different", "none", "the last alone", "none", "one"):
        args[8] = torch.tensor(mixes(130, 4)[mix], dtype=torch.int32)
        args[9] = lora_active(args[8], 4)
        assert_near(launch_in_threads(tuple(args), sm_budget=5), linear_8bit_lora_silu_mul.reference(*args, BF16), NEAR)


# Machine code


@pytest.mark.parametrize("rank", [32, 64])
def test_kernel_compiles_without_spills(rank: int) -> None:
    args = inputs(128, *LLAMA_8B, rank=rank, slots=8, device="meta")
    (code,) = launched(linear_8bit_lora_silu_mul, *args, BF16, pdl=True)
    assert code.spills == 0 and code.local_bytes == 0 and code.shared_bytes <= SHARED
    assert code.sass["IGMMA"] > 0 and code.sass["HGMMA"] > 0 and code.sass["HMMA"] == 0
    assert code.sass["UTMALDG"] > 0 and code.sass["UTMASTG"] > 0


# lora_active


@pytest.mark.interpret
@pytest.mark.parametrize(("tokens", "slots"), [(1, 1), (5, 3), (64, 8), (128, 100), (130, 17), (300, 1024)])
@pytest.mark.parametrize("mix", mixes(1, 1))
def test_lora_active(tokens: int, slots: int, mix: str) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    index = torch.tensor(mixes(tokens, max(2, slots))[mix], dtype=torch.int32, device=device).clamp_max(slots - 1)
    (active,) = check_kernel(lora_active, index, slots, tolerances={0: EXACT})
    for row, part in zip(active.tolist(), index.split(128), strict=True):
        found = sorted(set(part.tolist()) - {-1})
        assert row == [len(found), *found, *[-1] * (slots - len(found))]


# On a GPU


def assert_right(got: torch.Tensor, want: torch.Tensor) -> None:
    """Ranks that lie between two steps of eight bits may go either way: a step is up to a hundredth of a token's delta."""
    assert_near(got, want, Tolerance(rtol=2.0**-6, atol=6e-2))
    assert (got.double() - want.double()).norm() < 3e-3 * want.double().norm()


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "k", "width", "rank", "slots", "mix"), [
    *((tokens, *LLAMA_8B, rank, 8, mix) for tokens in (65, 130, 256) for rank in (32, 64) for mix in ("different", "some without", "one")),
    (256, *LLAMA_8B, 32, 8, "none"), (256, 512, 1024, 32, 35, "different"), (130, 512, 1024, 64, 19, "some without"),
])  # fmt: skip
def test_kernel_is_the_reference(tokens: int, k: int, width: int, rank: int, slots: int, mix: str) -> None:
    args = inputs(tokens, k, width, rank, slots, mixes(tokens, slots)[mix], device="cuda")
    want = linear_8bit_lora_silu_mul.reference(*args, BF16)
    for sms in (None, 40):
        results = []
        for _ in range(3):
            poison_scratch(want.device)
            out = poison(torch.empty_like(want))
            linear_8bit_lora_silu_mul.launch(*args, BF16, out=(out,), pdl=True, sm_budget=sms)
            results.append(out)
        assert_right(results[0], want)
        assert all(torch.equal(bits(results[0]), bits(other)) for other in results[1:]), "other bits at another launch"
    assert not workspace(want.device, "linear_8bit_lora.counter", 4, zero=True).any()


@pytest.mark.gpu
def test_a_captured_graph_replays_with_other_adapters() -> None:
    """Counters are as each launch must find them, whatever adapters the step before had; launches follow each other by PDL."""
    args = list(inputs(130, 1024, 2048, slots=6, device="cuda"))
    outs = [linear_8bit_lora_silu_mul.fake(*args, BF16) for _ in range(3)]
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    linear_8bit_lora_silu_mul.launch(*args, BF16, out=(outs[0],), pdl=True)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        lora_active.launch(args[8], 6, out=(args[9],), pdl=True)
        for out in outs:
            linear_8bit_lora_silu_mul.launch(*args, BF16, out=(out,), pdl=True)
    for mix in ("none", "different", "the last alone", "one", "none", "some without"):
        args[8].copy_(torch.tensor(mixes(130, 6)[mix], dtype=torch.int32))
        for out in outs:
            poison(out)
        graph.replay()
        torch.cuda.synchronize()
        want = linear_8bit_lora_silu_mul.reference(*args[:9], lora_active(args[8], 6), BF16)
        for out in outs:
            assert_right(out, want)
