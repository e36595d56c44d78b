"""A program bound to tensors: run step by step, or captured as one CUDA graph with the side stream's forks and joins.

Views, callables and events are resolved once, so a run is a loop over closures. Without a GPU the steps run the ops'
references in the same planned memory, which also tests the plan.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch

from ...ops.core.registry import as_outputs
from ...ops.core.reproducible_sums import linear, mm
from ..program.buffers import Buffer, ProgramError, View
from ..program.calls import out_overload, overload_of, own_op
from ..program.program import Program, Step
from .collectives import placed_tensors
from .cuda_graph import capture, capture_stream, first_runs
from .profiler_ranges import SWITCH, named, ranged, replay_range, step_range

OnStep = Callable[[Step, tuple[torch.Tensor, ...]], None]
# used on a CPU: the results of torch's own ops depend on the number of rows there
CPU_PRODUCTS: Mapping[str, Callable[..., torch.Tensor]] = {"aten.linear.default": linear, "aten.mm.default": mm}


class BoundProgram:
    """`program` with its tensors.

    tensors  buffer name -> tensor for every input, weight and adapter (extra names are ignored); optionally for outputs
    device   device of the arena (default: the tensors')
    arena    uint8 tensor to use; programs that never run at the same time may share it
    poison   fill the arena and the outputs with NaN bytes first

    Raises ProgramError for a missing tensor, and for a shape, dtype, stride or device that differs from the program's.
    """

    def __init__(
        self,
        program: Program,
        tensors: Mapping[str, torch.Tensor],
        device: torch.device | str | None = None,
        *,
        arena: torch.Tensor | None = None,
        poison: bool = False,
    ) -> None:
        self.program = program
        self.device = _resolve_device(program, tensors, device)
        self.arena = self._arena(arena)
        self._arenas: dict[torch.dtype, torch.Tensor] = {}
        self._placed = placed_tensors(program, self.device)
        self._buffers = {buffer.name: self._bind(buffer, tensors) for buffer in program.buffers}
        if poison:
            self.poison()
        self.outputs: tuple[Any, ...] = tuple(self._value(value) for value in program.outputs)
        self.outs: tuple[tuple[torch.Tensor, ...], ...] = tuple(
            tuple(self._tensor(view) for view in step.outs) for step in program.steps
        )
        self._calls = [self._call(step, outs) for step, outs in zip(program.steps, self.outs, strict=True)]
        self._graph: Any = None
        two_streams = self.device.type == "cuda" and any(step.stream == "side" for step in program.steps)
        self._side = _Side(program, self.device) if two_streams else None

    def run(self, *, synchronize: bool = False, on_step: OnStep | None = None) -> tuple[Any, ...]:
        """Run every step now; return the outputs (the same tensors at each run).

        `synchronize` waits after each step, so that errors name their step. `on_step(step, outs)` is called after each
        step.
        """
        calls = self._calls if SWITCH.recording is None else self._named_calls()
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            if self._side is not None:
                self._run_two_streams(self._side, calls, synchronize, on_step)
            else:
                for step, call, outs in zip(self.program.steps, calls, self.outs, strict=True):
                    call()
                    self._after(step, outs, synchronize, on_step)
        return self.outputs

    def run_step(self, index: int) -> tuple[torch.Tensor, ...]:
        """Run one step on the current stream; return its results."""
        self._calls[index]()
        return self.outs[index]

    def arguments(self, index: int) -> list[Any]:
        """Return the arguments of step `index` in the order of its op's schema."""
        return [self._value(value) for value in self.program.steps[index].args]

    def prepare(self) -> None:
        """Run every kind of step that this process has not run yet (GPU only, see `first_runs`), and wait.

        This compiles and loads kernels. Results are meaningless, since most steps are skipped. Set slot_mapping to -1,
        else the caches are written.
        """
        if self.device.type != "cuda":
            return
        with torch.cuda.device(self.device):
            stream = torch.cuda.current_stream(self.device)
            for index in first_runs(self.program, self._buffers, (self.device, stream.cuda_stream)):
                self._calls[index]()
            stream.synchronize()

    def capture(self, pool: Any = None) -> "BoundProgram":
        """Capture the run as a CUDA graph and return self; without a GPU `replay` runs the steps.

        `pool`: memory pool to share with other captures. Steps run first as in `prepare`: set slot_mapping to -1, else
        the caches are written. During the capture other threads may wait for events and launch on other streams, but
        must not use this stream.
        """
        if self.device.type != "cuda":
            return self
        self._graph = capture(self.device, self.prepare, self.run, pool)
        return self

    def replay(self) -> tuple[Any, ...]:
        """Launch the captured graph on the current stream, or run the steps without one; return the outputs."""
        if self._graph is None:
            return self.run()
        if SWITCH.recording is None:
            self._graph.replay()
        else:
            SWITCH.recording.bound[self.program.name] = self
            with named(replay_range(self.program)):
                self._graph.replay()
        return self.outputs

    @property
    def captured(self) -> bool:
        """Whether `replay` launches a CUDA graph."""
        return self._graph is not None

    @property
    def pool(self) -> Any:
        """The captured graph's memory pool for the next `capture(pool=...)`; None before a capture."""
        return None if self._graph is None else self._graph.pool()

    def poison(self) -> None:
        """Fill temporaries and outputs with bytes 0xff (NaN in every float dtype)."""
        self.arena.fill_(0xFF)
        for buffer in self.program.of_kind("output"):
            tensor = self._buffers[buffer.name]
            if tensor.numel():
                tensor.as_strided((buffer.nbytes // buffer.dtype.itemsize,), (1,)).view(torch.uint8).fill_(0xFF)

    @property
    def buffers(self) -> Mapping[str, torch.Tensor]:
        """The tensors by buffer name."""
        return self._buffers

    def buffer(self, name: str) -> torch.Tensor:
        """Return the tensor of a buffer. Other temporaries may have overwritten the bytes of a temporary."""
        return self._buffers[name]

    def step_times(self, repeats: int = 10) -> list[float]:
        """Return the seconds of each step run alone (minimum of `repeats`)."""
        best = [float("inf")] * len(self._calls)
        for _ in range(repeats):
            for index, call in enumerate(self._calls):
                best[index] = min(best[index], self._timed(call))
        return best

    def _timed(self, call: Callable[[], None]) -> float:
        if self.device.type != "cuda":
            begin = time.perf_counter()
            call()
            return time.perf_counter() - begin
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        call()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) * 1e-3

    def _named_calls(self) -> list[Callable[[], None]]:
        """Return each step's call within a profiler range of its name."""
        if SWITCH.recording is not None:
            SWITCH.recording.bound[self.program.name] = self
        names = [step_range(self.program, step) for step in self.program.steps]
        return list(map(ranged, names, self._calls))

    def _run_two_streams(
        self, side: "_Side", calls: list[Callable[[], None]], synchronize: bool, on_step: OnStep | None
    ) -> None:
        main = current = torch.cuda.current_stream(self.device)
        side.fork.record(main)
        side.stream.wait_event(side.fork)  # a capture includes the side stream only if it waits for the main one
        try:
            for step, call, outs in zip(self.program.steps, calls, self.outs, strict=True):
                stream = main if step.stream == "main" else side.stream
                for wait in step.waits:
                    stream.wait_event(side.events[wait])
                if stream is not current:
                    torch.cuda.set_stream(stream)
                    current = stream
                call()
                if step.records:
                    side.events[step.index].record(stream)
                self._after(step, outs, synchronize, on_step)
        finally:
            torch.cuda.set_stream(main)
        side.join.record(side.stream)
        main.wait_event(side.join)

    def _after(self, step: Step, outs: tuple[torch.Tensor, ...], synchronize: bool, on_step: OnStep | None) -> None:
        if synchronize and self.device.type == "cuda":
            try:
                torch.cuda.synchronize(self.device)
            except RuntimeError as error:
                raise RuntimeError(f"step {step.index} {step.name} ({step.op}) failed on the GPU: {error}") from error
        if on_step is not None:
            on_step(step, outs)

    def _arena(self, arena: torch.Tensor | None) -> torch.Tensor:
        nbytes = self.program.arena_bytes
        if arena is None:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        if (
            arena.dtype != torch.uint8
            or arena.dim() != 1
            or not arena.is_contiguous()
            or arena.numel() < nbytes
            or not _same_device(arena.device, self.device)
        ):
            found = f"{arena.dtype} {tuple(arena.shape)} on {arena.device}"
            raise ProgramError(f"the arena must be uint8 of at least {nbytes} bytes on {self.device}, got {found}")
        return arena

    def _typed_arena(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the arena as elements of `dtype`."""
        if dtype not in self._arenas:
            whole = self.arena.numel() - self.arena.numel() % dtype.itemsize
            self._arenas[dtype] = self.arena[:whole].view(dtype)
        return self._arenas[dtype]

    def _bind(self, buffer: Buffer, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if buffer.name in self._placed:
            return self._placed[buffer.name]
        if buffer.kind == "temp":
            if not buffer.nbytes:
                return torch.empty(buffer.shape, dtype=buffer.dtype, device=self.device)
            first, size = buffer.offset or 0, buffer.dtype.itemsize
            if first % size:
                raise ProgramError(
                    f"temp {buffer.name!r} is at byte {first} of the arena, which is not a multiple of its dtype's "
                    f"{size} bytes"
                )
            return self._typed_arena(buffer.dtype).as_strided(buffer.shape, buffer.strides, first // size)
        if buffer.name not in tensors:
            if buffer.kind == "output":
                return torch.empty_strided(buffer.shape, buffer.strides, dtype=buffer.dtype, device=self.device)
            raise ProgramError(f"no tensor is given for the {buffer.kind} {buffer.name!r}")
        tensor = tensors[buffer.name]
        if tensor.shape != buffer.shape or tensor.dtype != buffer.dtype or not _same_device(tensor.device, self.device):
            found = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
            wanted = f"{buffer.dtype} {list(buffer.shape)} on {self.device}"
            raise ProgramError(f"{buffer.kind} {buffer.name!r} must be {wanted}, got {found}")
        have = tensor.stride()
        if (
            have != buffer.strides
            and tensor.numel()
            and any(size > 1 and a != b for size, a, b in zip(buffer.shape, have, buffer.strides, strict=True))
        ):
            raise ProgramError(
                f"{buffer.kind} {buffer.name!r} has strides {have}, but the program needs {buffer.strides}; pass a "
                "contiguous tensor"
            )
        return tensor.detach()

    def _tensor(self, view: View) -> torch.Tensor:
        base = self._buffers[view.buffer]
        if (
            view.shape == base.shape
            and view.stride == base.stride()
            and view.offset == 0
            and view.dtype in (None, base.dtype)
        ):
            return base
        if 0 in view.shape:
            return torch.empty(view.shape, dtype=view.dtype or base.dtype, device=self.device)
        if view.dtype is not None and view.dtype != base.dtype:
            base = base.view(view.dtype)
        return base.as_strided(view.shape, view.stride, base.storage_offset() + view.offset)

    def _value(self, value: Any) -> Any:
        if isinstance(value, View):
            return self._tensor(value)
        if isinstance(value, tuple):
            return [self._value(entry) for entry in value]
        return self.device if isinstance(value, torch.device) else value

    def _call(self, step: Step, outs: tuple[torch.Tensor, ...]) -> Callable[[], None]:
        args = [self._value(value) for value in step.args]
        kwargs = {name: self._value(value) for name, value in step.kwargs}
        own = own_op(step.op)
        if own is not None:
            if self.device.type in ("cuda", "meta"):
                launch, budget, pdl = own.launch, step.sm_budget, step.pdl
                return lambda: launch(*args, out=outs, sm_budget=budget, pdl=pdl)
            reference = own.reference
            return lambda: _store(reference(*args), outs, step)
        product = CPU_PRODUCTS.get(step.op) if self.device.type == "cpu" else None
        if product is not None and outs[0].is_floating_point():
            return lambda: _store(product(*args, **kwargs), outs, step)
        variant = out_overload(step.op) if outs else None
        if variant is not None:
            overload, names = variant
            known = {argument.name for argument in overload._schema.arguments}
            targets = dict(zip(names, outs, strict=True))
            args = args[: len([argument for argument in overload._schema.arguments if not argument.kwarg_only])]
            kwargs = {name: value for name, value in kwargs.items() if name in known}
            return lambda: _without_result(overload(*args, **kwargs, **targets))
        plain = overload_of(step.op)
        return lambda: _store(plain(*args, **kwargs), outs, step)


class _Side:
    """The side stream and its events."""

    def __init__(self, program: Program, device: torch.device) -> None:
        self.stream = _side_stream(device)
        self.events = {step.index: torch.cuda.Event() for step in program.steps if step.records}
        self.fork, self.join = torch.cuda.Event(), torch.cuda.Event()


@lru_cache(maxsize=16)
def _side_stream(device: torch.device) -> Any:
    """Return the side stream of all programs.

    PyTorch reuses 32 streams in turn: a new stream for each program could be the capture stream.
    """
    stream = torch.cuda.Stream(device)
    while stream == capture_stream(device):
        stream = torch.cuda.Stream(device)
    return stream


def _without_result(result: Any) -> None:
    del result


def _store(result: Any, outs: tuple[torch.Tensor, ...], step: Step) -> None:
    """Copy an op's results to the program's tensors."""
    if not outs:
        return
    results = as_outputs(result)
    if len(results) != len(outs) or any(
        value.shape != out.shape or value.dtype != out.dtype for value, out in zip(results, outs, strict=True)
    ):
        made = [(value.dtype, tuple(value.shape)) for value in results]
        raise ProgramError(
            f"step {step.index} {step.name} ({step.op}) returned {made}, but the program expects "
            f"{[(out.dtype, tuple(out.shape)) for out in outs]}"
        )
    for value, out in zip(results, outs, strict=True):
        out.copy_(value)


def _resolve_device(
    program: Program, tensors: Mapping[str, torch.Tensor], device: torch.device | str | None
) -> torch.device:
    if device is None:
        names = [buffer.name for buffer in program.of_kind("input", "weight", "adapter")]
        bound = [tensors[name].device for name in names if name in tensors]
        return bound[0] if bound else torch.device("cpu")
    chosen = torch.device(device)
    if chosen.type == "cuda" and chosen.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return chosen


def _same_device(first: torch.device, second: torch.device) -> bool:
    return first.type == second.type and (first.index or 0) == (second.index or 0)
