"""Collectives' kernels on ranks that share memory, in Triton's interpreter and as machine code."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Optional

import pytest
import torch
from sidestream.ops.collectives.all_gather import all_gather, gather_parts
from sidestream.ops.collectives.all_reduce import add_in_rank_order, all_reduce
from sidestream.ops.collectives.all_reduce_add_rms_norm_quant import (
    all_reduce_add_rms_norm_quant,
    from_all_parts,
    with_delta,
)
from sidestream.ops.collectives.exchange import (
    READY,
    Exchange,
    exchange_bytes,
    free_exchange,
    is_one_shot,
    open_exchange,
    slots_at,
    unmap_peers,
)
from sidestream.ops.collectives.tensor_parallel_group import GroupError, RankGroup, tensor_parallel_group, world_of
from sidestream.ops.core import ipc_memory
from sidestream.ops.core.registry import as_outputs
from sidestream.ops.elementwise.rms_norm import add_rms_norm_quant
from support.checks import EXACT, Tolerance, assert_near, bits
from support.exchanges import register_rank, run_ranks, shared_exchanges, shared_tensor
from support.ipc import FakeDriver, install, on_threads
from support.sm90 import launched

BF16, F16, F32, E4M3, INT8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int8
EPS = 1e-5


@dataclass(frozen=True)
class Case:
    """A launch: which kernel, and of what."""

    rows: int
    one_shot: bool
    delta: bool = False
    keep: bool = False
    narrow: torch.dtype = INT8
    rotate: int = 0
    spread: bool = False
    placed: Optional[int] = None
    stream: Optional[torch.dtype] = None  # the residuals' dtype; None: the others'

    @property
    def eight(self) -> bool:
        """Whether rows are taken from their owners in eight bits, and the residual stays with them."""
        return self.spread and not self.keep and not self.one_shot


class Inputs:
    """Random inputs of all ranks for a case, and where their outputs go."""

    def __init__(self, case: Case, exchanges: Sequence[Exchange], width: int, dtype: torch.dtype) -> None:
        self.case, self.dtype = case, dtype
        world, shape = len(exchanges), (case.rows, width)
        self.partials = [torch.randn(shape).to(dtype) for _ in range(world)]
        self.deltas = [torch.randn(shape).to(dtype) if case.delta else None for _ in range(world)]
        self.residual, self.weight = torch.randn(shape), (1 + 0.1 * torch.randn(width)).to(dtype)
        self.residual = self.residual.to(dtype) if case.stream is None else (20 * self.residual).to(case.stream)
        self.outs = [
            tuple(
                shared_tensor(each.shape, each.dtype) for each in self.fused.fake(*self.arguments(rank, f"tp{world}"))
            )
            for rank in range(world)
        ]
        self.sums = [shared_tensor(shape, dtype) for _ in range(world)]

    fused = all_reduce_add_rms_norm_quant

    def arguments(self, rank: int, group: str) -> tuple[Any, ...]:
        case, residual = self.case, self.residual
        if case.eight:  # of the others' rows nothing is known
            residual = residual.clone()
            residual[[row for row in range(case.rows) if row % world_of(group) != rank]] = float("nan")
        formed = (case.keep, case.narrow, case.rotate, case.spread)
        return self.partials[rank], residual, self.deltas[rank], self.weight, EPS, group, *formed

    def launch(self, group: RankGroup, exchange: Exchange) -> None:
        partial, *others = self.arguments(group.rank, group.name)
        if self.case.placed is not None:
            place = exchange.places()[self.case.placed][: partial.nbytes].view(self.dtype).view(partial.shape)
            partial = place.copy_(partial)
        before = [bits(each).clone() for each in (partial, *others) if isinstance(each, torch.Tensor)]
        form = {"one_shot": self.case.one_shot}
        self.fused.launch(partial, *others, out=self.outs[group.rank], **form)
        all_reduce.launch(partial, group.name, out=(self.sums[group.rank],), **form)
        after = [bits(each) for each in (partial, *others) if isinstance(each, torch.Tensor)]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "an input was changed"

    def check(self) -> None:
        case, world = self.case, len(self.partials)
        parts = [with_delta(*each) for each in zip(self.partials, self.deltas, strict=True)]
        expected = from_all_parts(parts, self.residual, self.weight, EPS, case.keep, case.narrow, case.rotate)
        bf16 = self.dtype == BF16
        # the statistics' last bit may flip x * rstd, and that the product, the row's largest value and so its scale
        y = Tolerance(2.0**-6, 1e-5, differing=0.02) if bf16 else Tolerance(1e-5, 1e-5)
        q = Tolerance(0.0, 2.0, differing=0.05) if case.narrow == INT8 else Tolerance(2.0**-3, 2.0**-9, differing=0.05)
        tolerances = (y, q, Tolerance(2.0**-6 if bf16 else 1e-5), EXACT)
        for rank, outs in enumerate(self.outs):
            own = [row for row in range(case.rows) if not case.eight or row % world == rank]
            for place, (got, want, tolerance) in enumerate(zip(outs, expected, tolerances, strict=True)):
                rows = own if place == 3 else slice(None)
                assert_near(got[rows], want[rows], tolerance, f"{case} rank {rank} output {place}")
                if place < 3 or not case.eight:
                    assert torch.equal(bits(got), bits(self.outs[0][place])), f"{case}: rank {rank} has other bits"
            assert_near(self.sums[rank], add_in_rank_order(self.partials).to(self.dtype), EXACT, f"{case} sum")


def check(
    cases: Sequence[Case], world: int, width: int = 64, dtype: torch.dtype = BF16, **options: Any
) -> list[Inputs]:
    """Run the cases one after the other on all ranks, and compare with the reference."""
    exchanges = shared_exchanges(world, **options)
    inputs = [Inputs(case, exchanges, width, dtype) for case in cases]

    def work(group: RankGroup) -> None:
        for each in inputs:
            each.launch(group, exchanges[group.rank])

    run_ranks(exchanges, work)
    for each in inputs:
        each.check()
    return inputs


ONE, TWO = Case(3, one_shot=True), Case(3, one_shot=False)


@pytest.mark.interpret
def test_kernels_of_two_ranks() -> None:
    cases = [
        replace(ONE, delta=True, keep=True),
        replace(TWO, keep=True, narrow=E4M3),
        replace(TWO, rows=5, spread=True, rotate=8),
        replace(ONE, placed=0, spread=True),
        replace(TWO, placed=1, delta=True, spread=True, narrow=E4M3),
        replace(TWO, rows=1, placed=0, spread=True),
        replace(TWO, delta=True, spread=True, keep=True),
        replace(ONE, delta=True, stream=F16),
        replace(TWO, rows=5, spread=True, rotate=8, stream=F16),
        replace(TWO, delta=True, keep=True, stream=F16),
    ]
    check(cases, 2)


@pytest.mark.interpret
def test_kernels_of_one_rank_and_of_many() -> None:
    for world, width, rows, dtype in ((1, 48, 2, F32), (4, 40, 5, BF16), (8, 64, 2, F32)):
        check([replace(ONE, rows=1), replace(TWO, rows=rows, spread=True, narrow=E4M3)], world, width, dtype)


@pytest.mark.interpret
def test_more_rows_than_a_slot_holds() -> None:
    inputs = check([replace(TWO, rows=9, spread=True), replace(ONE, rows=9)], 2, slot_bytes=512)
    assert inputs[0].partials[0].nbytes > 2 * 512, "three launches"


@pytest.mark.interpret
@pytest.mark.parametrize("world", [2, 3])
def test_parts_of_any_size_are_gathered_between_sums(world: int) -> None:
    """More words than a slot holds, and bytes that are no whole words."""
    exchanges = shared_exchanges(world)
    shapes = [((3, 11000), F32), ((7, 5), BF16), ((4,), torch.int64), ((3,), BF16), ((1, 1), INT8)]
    parts = [[(100 * torch.randn(shape)).to(dtype) for shape, dtype in shapes] for _ in range(world)]
    found = [[shared_tensor((world, *shape), dtype) for shape, dtype in shapes] for _ in range(world)]
    sums = [shared_tensor((2, 64), F32) for _ in range(world)]
    columns = [shared_tensor((7, 4 * world), BF16) for _ in range(world)]

    def work(group: RankGroup) -> None:
        for part, target in zip(parts[group.rank], found[group.rank], strict=True):
            target.copy_(gather_parts(part, group.name))
            all_reduce.launch(torch.full((2, 64), 1.0 + group.rank), group.name, out=(sums[group.rank],))
        all_gather.launch(parts[group.rank][1], group.name, 4 * world, out=(columns[group.rank],))

    run_ranks(exchanges, work)
    for place in range(len(shapes)):
        expected = torch.stack([parts[rank][place] for rank in range(world)])
        assert all(torch.equal(bits(each[place]), bits(expected)) for each in found), shapes[place]
    assert all((each == sum(range(1, world + 1))).all() for each in sums)
    joined = torch.cat([each[1] for each in parts], dim=-1)[:, : 4 * world]
    assert all(torch.equal(each, joined) for each in columns)


@pytest.mark.interpret
def test_the_same_inputs_give_the_same_bits() -> None:
    exchanges = shared_exchanges(2)
    case = replace(TWO, delta=True, spread=True)
    first = Inputs(case, exchanges, 64, BF16)
    again = Inputs(case, exchanges, 64, BF16)
    for name in ("partials", "deltas", "residual", "weight"):
        setattr(again, name, getattr(first, name))

    def work(group: RankGroup) -> None:
        for each in (first, again):
            each.launch(group, exchanges[group.rank])

    run_ranks(exchanges, work)
    for rank in range(2):
        for a, b in zip(first.outs[rank][:3], again.outs[rank][:3], strict=True):
            assert torch.equal(bits(a), bits(b))


def test_one_rank_is_the_op_of_one_gpu() -> None:
    register_rank(Exchange(0, (torch.zeros(exchange_bytes(1, 256), dtype=torch.uint8),), 256))
    x, residual, weight = torch.randn(4, 48).bfloat16(), torch.randn(4, 48).bfloat16(), torch.randn(48).bfloat16()
    ours = all_reduce_add_rms_norm_quant(x, residual, None, weight, EPS, "tp1", True, INT8, 8)
    theirs = add_rms_norm_quant(x, residual, None, weight, EPS, True, INT8, 8)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.machine_code
@pytest.mark.parametrize("width", [8192, 16384, 4096])
@pytest.mark.parametrize("world", [2, 8])
def test_machine_code(world: int, width: int) -> None:
    group, x = tensor_parallel_group(world), torch.empty(64, width, device="meta", dtype=BF16)
    forms = ((True, True, x, x), (True, False, None, x), (False, False, None, x), (False, True, x, x))
    for one_shot, keep, delta, residual in (*forms, (True, False, None, x.half()), (False, True, x, x.half())):
        args = (x, residual, delta, x[0], EPS, group, keep, INT8, 8, True)
        (code,) = launched(all_reduce_add_rms_norm_quant, *args, one_shot=one_shot, pdl=True)
        assert code.spills == 0 and code.ptx_count("griddepcontrol.wait") == 1
        check_order(code, 1 if one_shot else 2)
        assert code.sass["MEMBAR"] == (1 if one_shot else 2), "a signal is one fence"
    for one_shot in (True, False):
        (code,) = launched(all_reduce, x, group, one_shot=one_shot, pdl=True)
        assert code.spills == 0
        check_order(code, 1 if one_shot else 2)
    (code,) = launched(all_gather, x[:4], group, world * width, pdl=True)
    assert code.spills == 0
    check_order(code, 1)


def check_order(code: Any, waits: int) -> None:
    """Peers are read after their flags, by wide loads, and flags are stored at the system's scope."""
    text = code.ptx_text
    assert text.count("ld.acquire.sys") == waits
    assert "ld.global.v4" in text[text.index("ld.acquire.sys") :]
    assert "ld.global.b16" not in text and "ld.global.b8" not in text
    assert text.index("griddepcontrol.wait") < text.index("atom.global") < text.index("fence.acq_rel.sys")
    assert text.index("fence.acq_rel.sys") < text.index("st.relaxed.sys") < text.rindex("ld.acquire.sys")


def test_few_bytes_go_in_one_shot() -> None:
    row = 2 * 8192
    assert [is_one_shot(count * row, 2) for count in (1, 64, 128, 256)] == [True, True, True, False]
    assert is_one_shot(16 * row, 8) and not is_one_shot(32 * row, 8)


def test_what_can_not_be_exchanged_is_refused() -> None:
    wide, odd = (torch.empty(2, width, device="meta", dtype=BF16) for width in (20000, 12))
    for x in (wide, odd):
        with pytest.raises(ValueError, match=rf"all_reduce: rows of {x.shape[1]} columns"):
            all_reduce.launch(x, "tp2", out=as_outputs(all_reduce.fake(x, "tp2")))
    small = Exchange(0, (torch.empty(exchange_bytes(2, 256), dtype=torch.uint8, device="meta"),) * 2, 256)
    x = torch.empty(2, 128, device="meta", dtype=BF16)
    with pytest.raises(ValueError, match=r"2 rows of 256 bytes do not fit 256 bytes; .*slot_bytes"):
        list(small.launches("all_reduce", x, placed=True))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    return install(monkeypatch)


def test_ranks_share_their_memories_and_unmap_all_before_one_is_freed(driver: FakeDriver) -> None:
    def work(group: RankGroup) -> list[tuple[int, int]]:
        exchange = open_exchange(group, torch.device("cuda", group.rank), 256)
        assert exchange.memory.sum() == 0 and exchange.world == 2
        group.gather(torch.tensor([0]))
        exchange.memory[-1] = 1 + group.rank
        group.gather(torch.tensor([0]))
        read = [int(memory[-1]) for memory in exchange.memories]
        unmap_peers(group)
        flags = exchange.memory[READY : slots_at(2)].view(torch.int64)
        group.gather(torch.tensor([0]))
        ended = int(flags.min())
        free_exchange(group)
        assert not group.buffers
        free_exchange(group)
        return [*read, ended]

    last = 0x7F7F7F7F7F7F7F7F
    assert on_threads(2, work) == [[1, 2, last]] * 2, "a kernel that waits for a peer ends"
    assert not driver.allocations and not any(driver.mapped.values()) and not driver.freed_while_mapped


@pytest.mark.parametrize("call", ["cuMemAlloc_v2", "cuIpcOpenMemHandle_v2", "cuMemGetAddressRange_v2"])
def test_ranks_that_can_t_share_memory_free_it_on_all(
    driver: FakeDriver, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only rank 1 fails, and rank 0 has mapped its memory by then."""

    freed, close, free = threading.Event(), driver._cuIpcCloseMemHandle, FakeDriver._cuMemFree_v2
    drivers = [driver, FakeDriver()]

    def close_late(address: Any) -> None:
        freed.wait(0.1)  # for rank 1, which must not free the memory before
        close(address)

    def free_and_tell(address: Any) -> None:
        free(drivers[1], address)
        freed.set()

    driver._cuIpcCloseMemHandle, drivers[1]._cuMemFree_v2 = close_late, free_and_tell  # type: ignore[method-assign]
    drivers[1].allocations, drivers[1].mapped, drivers[1].fails = driver.allocations, driver.mapped, {call: 101}

    def work(group: RankGroup) -> None:
        local.driver = drivers[group.rank]
        open_exchange(group, torch.device("cuda", group.rank), 256)

    local = threading.local()
    monkeypatch.setattr(ipc_memory, "cuda_driver", lambda: local.driver)
    errors = on_threads(2, work)
    assert all(isinstance(error, GroupError) for error in errors), errors
    assert "rank 1 of 2 on cuda:1 can't share memory with its peers: the CUDA driver's " + call in str(errors[1])
    assert "--ipc=host" in str(errors[0])
    assert not driver.allocations and not any(driver.mapped.values())
    assert not any(each.freed_while_mapped for each in drivers)
