"""A Gluon kernel's own Python code on the CPU: each warp partition of each CTA is a thread, TMA and tensor cores are
stand-ins.

    with kernels_in_threads(decoder_block, decoder_block_gluon, decoder_block_streams):
        decoder_block.launch(*args, out=out)

Triton's interpreter runs no Gluon. This shows what is wrong with a kernel's logic: addresses out of range, a ring or an
mbarrier that is miscounted (bytes included), counters that leave a CTA waiting for ever, sums of the wrong planes.
Shared memory starts as NaN, and loads land late at random. It knows nothing of layouts, swizzles, fences and registers,
and a partition's threads never race each other. Nor does it know what Triton makes of Python: 3.6 has lost, in Gluon, a
loop's `begin = 0` after an earlier `begin = 4`, where an inner loop began there.
"""

import random
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import reduce
from inspect import signature
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton.language as tl

LIMIT = 100.0  # seconds after which a launch counts as hung


class _Whole(int):
    """A program id or a number from memory: an int whose sums and comparisons convert like a kernel's."""

    def __add__(self, other: Any) -> Any:
        return _Whole(int(self) + int(other)) if isinstance(other, int) else other + int(self)

    __radd__ = __add__

    def __sub__(self, other: int) -> "_Whole":
        return _Whole(int(self) - int(other))

    def __rsub__(self, other: int) -> "_Whole":
        return _Whole(int(other) - int(self))

    def __mul__(self, other: Any) -> Any:
        return _Whole(int(self) * int(other)) if isinstance(other, int) else other * int(self)

    def __floordiv__(self, other: int) -> "_Whole":
        return _Whole(int(self) // int(other))

    def __mod__(self, other: int) -> "_Whole":
        return _Whole(int(self) % int(other))

    def __ge__(self, other: int) -> "_Whole":  # type: ignore[override]
        return _Whole(int(self) >= int(other))

    def to(self, _dtype: Any) -> int:
        return int(self)


class _Values(torch.Tensor):
    """A tensor whose `+=` makes a new one: values of a kernel are not memory."""

    def __iadd__(self, other: Any) -> Any:
        return self + other

    def to(self, dtype: Any, bitcast: bool = False) -> Any:
        return self.view(dtype) if bitcast else super().to(dtype)

    def split(self, *sizes: int) -> Any:  # type: ignore[override]
        return super().split(*sizes) if sizes else self.unbind(-1)  # torch's, and Triton's


class _Pointer:
    def __init__(self, memory: torch.Tensor, at: Any = 0) -> None:
        self.memory, self.at = memory, at
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, other: Any) -> "_Pointer":
        return _Pointer(self.memory, self.at + other)

    def __getitem__(self, key: Any) -> "_Pointer":
        return _Pointer(self.memory, self.at[key])

    def raw(self) -> torch.Tensor:
        """What torch can index: bytes where it lacks the dtype's arithmetic."""
        return self.memory.view(torch.uint8) if self.memory.dtype == torch.float8_e4m3fn else self.memory


class _Shared:
    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory

    @property
    def dtype(self) -> torch.dtype:
        return self.memory.dtype

    def index(self, i: int) -> "_Shared":
        return _Shared(self.memory[int(i)])

    def slice(self, start: int, length: int, dim: int = 0) -> "_Shared":
        return _Shared(self.memory.narrow(dim, start, length))

    def permute(self, order: Any) -> "_Shared":
        return _Shared(self.memory.permute(order))

    def load(self, _layout: Any = None) -> torch.Tensor:
        return _values(self.memory.clone())

    def store(self, values: torch.Tensor) -> None:
        assert self.memory.shape == values.shape, (
            f"{tuple(values.shape)} stored to shared memory of {tuple(self.memory.shape)}"
        )
        self.memory.copy_(values)


class _Barriers:
    def __init__(self, count: int) -> None:
        self.barriers = [SimpleNamespace(phase=0, count=1, pending=1, transfer=0) for _ in range(count)]

    def index(self, i: int) -> SimpleNamespace:
        return self.barriers[int(i)]


class _Boxes:
    layout = None

    def __init__(self, descriptor: Any) -> None:
        self.matrix, self.block, self.dtype = descriptor.base, list(descriptor.block_shape), descriptor.base.dtype


def _values(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(_Values)


class _Machine:
    """One launch: what its threads share."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.here = threading.local()
        self.errors: list[str] = []
        self.programs = 0

    # mbarriers

    @staticmethod
    def init(barrier: SimpleNamespace, count: int) -> None:
        barrier.count = barrier.pending = count

    def settle(self, barrier: SimpleNamespace) -> None:
        assert barrier.pending >= 0, "an mbarrier got more arrivals than it counts"
        if barrier.pending == 0 and barrier.transfer == 0:
            barrier.phase, barrier.pending = barrier.phase + 1, barrier.count
            self.changed.notify_all()

    def wait(self, barrier: SimpleNamespace, parity: int, pred: Any = True) -> None:
        if not pred:
            return
        with self.changed:
            while barrier.phase & 1 == int(parity) & 1:
                self.changed.wait(0.2)
                self.go_on()

    def go_on(self) -> None:
        if self.errors:
            raise SystemExit

    def arrive(self, barrier: SimpleNamespace, count: int = 1, pred: Any = True) -> None:
        if pred:
            with self.changed:
                barrier.pending -= count
                self.settle(barrier)

    def expect(self, barrier: SimpleNamespace, size: int, pred: Any = True) -> None:
        if pred:
            with self.changed:
                barrier.transfer, barrier.pending = barrier.transfer + size, barrier.pending - 1
                self.settle(barrier)

    # hardware

    def load_box(self, boxes: _Boxes, at: Any, barrier: SimpleNamespace, target: _Shared) -> None:
        time.sleep(random.random() * 3e-4)
        (row, column), (rows, columns) = map(int, at), boxes.block
        assert (
            list(target.memory.shape) == boxes.block and row >= 0 and 0 <= column <= boxes.matrix.shape[1] - columns
        ), (at, boxes.matrix.shape)
        source = boxes.matrix[row : row + rows, column : column + columns]
        target.memory.view(torch.uint8).zero_()
        target.memory[: source.shape[0]].copy_(source)
        with self.changed:
            barrier.transfer -= rows * columns * source.itemsize
            self.settle(barrier)

    @staticmethod
    def store_box(boxes: _Boxes, at: Any, source: _Shared) -> None:
        (row, column), (rows, columns) = map(int, at), boxes.block
        assert (
            list(source.memory.shape) == boxes.block and row >= 0 and 0 <= column <= boxes.matrix.shape[1] - columns
        ), (at, boxes.matrix.shape)
        target = boxes.matrix[row : row + rows, column : column + columns]
        target.copy_(source.memory[: target.shape[0]])

    @staticmethod
    def multiply(a: Any, b: _Shared, acc: torch.Tensor, use_acc: bool = True, is_async: bool = False) -> torch.Tensor:
        """`a` may be registers."""
        left = a.memory if isinstance(a, _Shared) else a
        product = (left.float() @ b.memory.float()).to(acc.dtype)  # int8: below 2^24, so exact
        assert (
            a.dtype == b.dtype
            and product.shape == acc.shape
            and acc.dtype == (torch.int32 if a.dtype == torch.int8 else torch.float32)
        )
        return _values(product + acc if use_acc else product)

    @staticmethod
    def view_shared(memory: _Shared, dtype: torch.dtype, shape: Any, _layout: Any) -> _Shared:
        return _Shared(memory.memory.reshape(-1).view(torch.uint8).view(dtype).view(*map(int, shape)))

    def warp_specialize(self, partitions: Any, _warps: Any = None, _registers: Any = None) -> None:
        self.together([(function, arguments, self.here.program) for function, arguments in partitions])

    def together(self, calls: Any) -> None:
        def run(function: Callable[..., None], arguments: Any, program: int) -> None:
            self.here.program = _Whole(program)
            try:
                function(*arguments)
            except Exception:
                self.errors.append(traceback.format_exc())

        threads = [threading.Thread(target=run, args=call, daemon=True) for call in calls]
        random.shuffle(threads)
        end = time.monotonic() + LIMIT
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                self.errors.append("hung: some thread waits for ever")
                return


class _Language:
    """The part of gluon.language that the kernels use, on tensors; layouts mean nothing."""

    float32, bfloat16, float16, float8e4nv = torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn
    int8, int32, int64 = torch.int8, torch.int32, torch.int64
    convert_layout = staticmethod(lambda values, _layout, assert_trivial=False: values)
    reshape = staticmethod(lambda values, shape: values.reshape(*map(int, shape)))
    permute = staticmethod(lambda values, order: values.permute(order))
    split = staticmethod(lambda values: values.unbind(-1))
    join = staticmethod(lambda first, second: torch.stack((first, second), -1))
    static_range = range
    static_assert = staticmethod(lambda *_args: None)
    max = staticmethod(lambda values, axis: values.amax(axis))
    sum = staticmethod(lambda values, axis: values.sum(axis))
    xor_sum = staticmethod(lambda values, axis, keep_dims: reduce(torch.bitwise_xor, values.split(1, axis)))
    abs = staticmethod(lambda values: values.abs())
    exp = staticmethod(lambda values: values.exp())
    exp2 = staticmethod(lambda values: values.exp2())
    log2 = staticmethod(lambda values: values.log2())
    associative_scan = staticmethod(lambda values, axis, _add: values.cumsum(axis))
    rsqrt = staticmethod(lambda values: values.rsqrt())
    zeros = staticmethod(lambda shape, dtype, _layout=None: _values(torch.zeros(shape, dtype=dtype)))
    full = staticmethod(lambda shape, value, dtype, _layout=None: _values(torch.full(shape, value, dtype=dtype)))
    zeros_like = staticmethod(torch.zeros_like)
    arange = staticmethod(lambda start, end, _layout=None: torch.arange(start, end))
    where = staticmethod(
        lambda chosen, a, b: torch.where(chosen, a, b) if isinstance(chosen, torch.Tensor) else a if chosen else b
    )
    minimum = staticmethod(
        lambda a, b: torch.minimum(a, torch.as_tensor(b)) if isinstance(a, torch.Tensor) else min(a, b)
    )
    maximum = staticmethod(
        lambda a, b: torch.maximum(a, torch.as_tensor(b).to(a.dtype)) if isinstance(a, torch.Tensor) else max(a, b)
    )

    def __init__(self, machine: _Machine) -> None:
        self.machine, self.warp_specialize = machine, machine.warp_specialize

    def __getattr__(self, name: str) -> Any:
        if name.endswith("Layout"):
            return lambda *args, **kwargs: None
        raise AttributeError(name)

    def program_id(self, _axis: int) -> int:
        return self.machine.here.program

    def num_programs(self, _axis: int) -> int:
        return self.machine.programs

    def load(self, pointer: _Pointer, mask: Any = None, other: Any = 0, cache_modifier: str = "") -> Any:
        at, mask = torch.broadcast_tensors(torch.as_tensor(pointer.at), torch.as_tensor(True if mask is None else mask))
        at = torch.where(mask, at, 0)
        assert int(at.min()) >= 0 and int(at.max()) < pointer.memory.numel(), "a load out of bounds"
        found = pointer.raw()[at]
        found = _values(torch.where(mask, found, torch.tensor(other).to(found.dtype)))
        return found if found.dim() else found.item() if found.is_floating_point() else _Whole(found.item())

    def store(self, pointer: _Pointer, values: Any, mask: Any = None) -> None:
        at, mask = torch.broadcast_tensors(torch.as_tensor(pointer.at), torch.as_tensor(True if mask is None else mask))
        at, given = at[mask], torch.broadcast_to(torch.as_tensor(values).to(pointer.memory.dtype), at.shape)[mask]
        assert not at.numel() or (int(at.min()) >= 0 and int(at.max()) < pointer.memory.numel()), (
            "a store out of bounds"
        )
        pointer.raw()[at] = given.view(pointer.raw().dtype)

    def atomic_add(self, pointer: _Pointer, value: int, sem: str = "") -> int:
        self.machine.go_on()
        time.sleep(random.random() * 1e-3)  # somebody else first
        with self.machine.changed:
            before = int(pointer.memory[int(pointer.at)])
            pointer.memory[int(pointer.at)] = before + value
            return before

    def allocate_shared_memory(self, dtype: torch.dtype, shape: Any, _layout: Any) -> Any:
        if dtype == torch.int64:
            return _Barriers(shape[0])
        memory = torch.empty(shape, dtype=dtype)
        memory.view(torch.uint8).fill_(0xFF)
        return _Shared(memory)


class _Launcher:
    def __init__(self, function: Callable[..., None], machine: _Machine) -> None:
        self.function, self.machine = function, machine

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, maxnreg: int = 0, launch_pdl: bool = False, **constants: Any) -> None:
            given = [
                _Pointer(arg.view(-1))
                if isinstance(arg, torch.Tensor)
                else _Boxes(arg)
                if hasattr(arg, "block_shape")
                else arg
                for arg in args
            ]
            if "num_warps" not in signature(self.function).parameters:
                constants.pop("num_warps", None)
            self.machine.programs = grid[0]
            self.machine.together(
                [(lambda: self.function(*given, **constants), (), program) for program in range(grid[0])]
            )
            assert not self.machine.errors, self.machine.errors[0]

        return launch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """From another kernel."""
        return self.function(*args, **kwargs)


@contextmanager
def kernels_in_threads(*modules: ModuleType) -> Iterator[None]:
    """Inside, launches of the kernels that `modules` import run in threads; name every module that has code of
    theirs.
    """
    machine = _Machine()
    nothing = staticmethod(lambda *_args: None).__func__
    barriers = SimpleNamespace(
        wait=machine.wait, arrive=machine.arrive, expect=machine.expect, init=machine.init, MBarrierLayout=nothing
    )
    stand_ins = {
        "gl": _Language(machine),
        "mbarrier": barriers,
        "tma_load": machine.load_box,
        "tma_store": machine.store_box,
        "tma": SimpleNamespace(store_wait=nothing),
        "view_shared": machine.view_shared,
        "warpgroup_mma": machine.multiply,
        "warpgroup_mma_wait": lambda outstanding, deps: deps[0] if len(deps) == 1 else deps,
        **dict.fromkeys(
            ("cta_barrier", "gdc_wait", "gdc_launch_dependents", "fence_before_tma", "fence_async_shared"), nothing
        ),
    }
    with ExitStack() as stack:
        for module in modules:
            runs = not hasattr(module, "launch")
            changed: dict[str, Any] = {}
            for name, value in vars(module).items():
                function = getattr(value, "fn", None)
                if isinstance(value, tl.constexpr):
                    changed[name] = value.value
                elif name in stand_ins and runs:
                    changed[name] = stand_ins[name]
                elif callable(function):
                    changed[name] = _Launcher(function, machine)
            stack.enter_context(patch.dict(vars(module), changed))
        yield
