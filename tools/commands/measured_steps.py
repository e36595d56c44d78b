"""Measured step times and kernel resources for a dump."""

import itertools
from collections.abc import Iterable

import torch
from tqdm import tqdm

from ...compiler.api import CompiledModel
from ...compiler.cost.bytes_and_flops import Assumptions
from ...compiler.cost.estimate import Placed
from ...compiler.cost.kernel_resources import Resources, program_resources
from ...compiler.cost.timings import Timings
from ...compiler.inspect.profile import capture_profile
from ...compiler.program.program import Bucket
from ...compiler.run.bound_program import BoundProgram
from ..bench.random_model import random_tensors

REPLAYS = 5


def measured_timings(compiled: CompiledModel, buckets: Iterable[Bucket], device: torch.device) -> Timings:
    """Run each bucket's program with random weights and inputs, and return the times of its steps.

    On a GPU they are from the median replay of a CUDA graph, on a CPU from the reference ops. Raises OutOfMemoryError
    if the device is too small for the model.
    """
    known: dict[str, torch.Tensor] = {}
    steps: dict[str, list[tuple[float, float]]] = {}
    for bucket in buckets:
        program = compiled.program(bucket)
        bound = BoundProgram(program, random_tensors(program, device, Assumptions(), known), device)
        steps[program.name] = [(place.start, place.end) for place in _one_run(bound)]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return Timings(steps=steps, device=name)


def kernel_resources(compiled: CompiledModel, buckets: Iterable[Bucket], show_progress: bool = True) -> Resources:
    """Return registers, shared memory and spills of the programs' kernels, on this GPU or else on a Hopper."""
    programs = [compiled.program(bucket) for bucket in buckets]
    return program_resources(
        programs,
        lambda launches: tqdm(
            launches, desc="Compiling kernels", unit="launch", disable=not show_progress, leave=False
        ),
    )


def _one_run(bound: BoundProgram) -> list[Placed]:
    if bound.device.type == "cuda":
        runs = sorted(capture_profile(bound, REPLAYS), key=lambda placed: max(place.end for place in placed))
        return runs[len(runs) // 2]
    ends = [0.0]
    for seconds in bound.step_times(REPLAYS):
        ends.append(ends[-1] + seconds)
    return [Placed(start, end) for start, end in itertools.pairwise(ends)]
